"""The crew's log and the bytes on it. Imports without torch."""

from motley.exchange.headers import BranchHeader, GroupHeader
from motley.exchange.log import Entry, Log, LogError, stands_under
from motley.exchange.log_file import LogFile, RecordHead
from motley.exchange.memory import MemoryLog, ShortLogError, cut_log, first_record
from motley.exchange.outbox import Head, Mark, Outbox, Signer, count_unsent
from motley.exchange.sections import RolloutArrays, WireError
from motley.exchange.wire import Header, Limits, Sealed, decode, encode, pack, unpack

__all__ = [
    "BranchHeader",
    "Entry",
    "GroupHeader",
    "Head",
    "Header",
    "Limits",
    "Log",
    "LogError",
    "LogFile",
    "Mark",
    "MemoryLog",
    "Outbox",
    "RecordHead",
    "RolloutArrays",
    "Sealed",
    "ShortLogError",
    "Signer",
    "WireError",
    "count_unsent",
    "cut_log",
    "decode",
    "encode",
    "first_record",
    "pack",
    "stands_under",
    "unpack",
]
