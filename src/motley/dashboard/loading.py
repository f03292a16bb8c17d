"""Loading: what takes seconds to be had, on a thread of its own: the task, the vocabularies and the
parts of the objective. Questions that need none of it are answered meanwhile.
"""

from __future__ import annotations

from threading import Event, Lock, Thread

from motley.archive import Archive, LogTexts, RolloutReader
from motley.archive.rollouts import Fates, problems_or_note
from motley.config import CrewConfig
from motley.dashboard.rows import ObjectiveRow, row_of


class NotReadyError(Exception):
    """What was asked for is still being read; who asks again in a moment gets it."""


class Loading:
    def __init__(self, archive: Archive, config: CrewConfig | None, fates: Fates) -> None:
        self._archive, self._config, self._fates = archive, config, fates
        self.thread = Thread(target=self._load, name="texts", daemon=True)
        self._starting = Lock()
        self._has_reader, self._has_row = Event(), Event()
        self._reader: RolloutReader | None = None
        self._row: ObjectiveRow | None = None

    def begin(self) -> None:
        """Start, if nobody has."""
        with self._starting:
            if self.thread.ident is None:
                self.thread.start()

    def reader(self, seconds: float) -> RolloutReader | None:
        """None: it is not ready in this time."""
        self.begin()
        self._has_reader.wait(seconds)
        return self._reader

    def row(self, seconds: float) -> ObjectiveRow | None:
        """With its parts, or with a note why they are not known. None: it is not ready in this
        time.
        """
        self.begin()
        self._has_row.wait(seconds)
        return self._row

    @property
    def notes(self) -> list[str]:
        """What cannot be had here, and why."""
        return [one.note for one in (self._reader, self._row) if one]

    def _load(self) -> None:
        try:
            problem_of, note = problems_or_note(self._archive)
            texts = LogTexts(self._config)
            texts.pieces("", ())  # have the vocabularies ready
        except (OSError, ImportError) as error:
            problem_of, texts = lambda group: None, LogTexts()
            note = f"without prompts and answers, as they cannot be read: {error}"
        self._reader = RolloutReader(
            self._archive, problem_of, texts, self._fates, students(self._config), note
        )
        self._has_reader.set()
        self._row = row_of(self._config) if self._config else ObjectiveRow(name="", about="")
        self._has_row.set()


def students(config: CrewConfig | None) -> tuple[str, ...]:
    return tuple(peer.name for peer in config.students) if config else ()
