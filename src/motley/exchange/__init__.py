"""The crew's log and the bytes on it. Imports without torch."""

from motley.exchange.log import Log
from motley.exchange.memory import MemoryLog, cut_log
from motley.exchange.wire import WireError, decode, encode

__all__ = ["Log", "MemoryLog", "WireError", "cut_log", "decode", "encode"]
