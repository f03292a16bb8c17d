"""zstd frames that a stranger made, decompressed in bounded memory.

Knows bytes only: what a frame holds, and what a bad one is called, is for who asked.
"""

from __future__ import annotations

from typing import Literal

import zstandard

# A window is no memory where a frame is decompressed at once, and a writer may take a larger one
# than what is in the frame asks for.
_MOST_WINDOW_BYTES = 2**23

Fault = Literal["corrupt", "undeclared", "inflated"]


class FrameError(ValueError):
    """A frame that is not decompressed. The message lacks its subject: "is not a zstd frame"."""

    def __init__(self, fault: Fault, text: str) -> None:
        super().__init__(text)
        self.fault: Fault = fault


def declared_bytes(frame: bytes, most_bytes: int) -> int:
    """The size a frame says it decompresses to; nothing is decompressed."""
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError as error:
        raise FrameError("corrupt", f"is not a zstd frame: {error}") from None
    if declared == zstandard.CONTENTSIZE_UNKNOWN:
        raise FrameError("undeclared", "does not declare its uncompressed size; a writer must")
    if declared > most_bytes:
        raise FrameError(
            "inflated", f"declares {declared} bytes uncompressed; expected at most {most_bytes}"
        )
    return declared


def decompressed(frame: bytes, most_bytes: int) -> bytes:
    """What a frame holds, which is nothing larger than `most_bytes`.

    A frame that declares its size is decompressed to that size whatever max_output_size says: the
    declaration is checked first.
    """
    declared_bytes(frame, most_bytes)
    try:
        return zstandard.ZstdDecompressor(
            max_window_size=max(most_bytes, _MOST_WINDOW_BYTES)
        ).decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError("corrupt", f"does not decompress: {error}") from None
