"""Which table of measured GEMM schedules plans the kernels: what was asked for, what was tuned here, what is shipped.

In this order: FUTRANSFORMER_SCHEDULES; the table that `futransformer tune` wrote for this kind of card, in the cache
folder; the shipped table, an H200's. An export is planned by the table that it was built with. Another table gives
other specs, and so other names and sources: nothing built before is taken for it.
"""

from __future__ import annotations

from pathlib import Path

from futransformer.build.cache import storage_errors
from futransformer.build.export import read_export, write_atomically
from futransformer.build.settings import BuildSettings
from futransformer.card import Card, current_card
from futransformer.generator.schedules import ScheduleTable, file_name, read_table, shipped_table


def tuned_path(settings: BuildSettings, card: Card) -> Path:
    """Where the table of a kind of card lies once it has been tuned."""
    return settings.tuned / file_name(card.name, card.multiprocessors)


def schedule_table(settings: BuildSettings, ordinal: int = 0) -> ScheduleTable:
    """Return the table for the GPU of that number; ConfigError when it is not one."""
    if settings.schedules is not None:
        return read_table(settings.schedules)
    if any(settings.tuned.glob("*.json")):
        card = current_card(ordinal)
        if card is not None and tuned_path(settings, card).is_file():
            return read_table(tuned_path(settings, card))
    return shipped_table()


def exported_table(folder: Path) -> ScheduleTable:
    """Return the table that an export was planned by; ArtifactError when the folder is no export."""
    return read_export(folder).table or shipped_table()


def recorded(table: ScheduleTable) -> ScheduleTable | None:
    """What an export says of its table: nothing where it is the shipped one, so that a later one is noticed."""
    return None if table == shipped_table() else table


def write_table(table: ScheduleTable, path: Path) -> None:
    """Write a table in one step; its folder is made when there is none."""
    with storage_errors("the table's folder", path.parent, "choose another with --output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, table.text().encode())
