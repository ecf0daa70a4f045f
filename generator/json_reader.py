"""Typed access to a JSON file: every complaint is a ConfigError that names the file and the key."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError

MOST_DIGITS = 1000  # of an integer, for a message names what it refuses; float64 ends at 309
MOST_NAME = 255  # bytes: Linux takes no longer name of a file
MOST_SHOWN = 80  # characters of a value in a message


def parse_json(text: str) -> Any:
    """Return what the text holds; ValueError or RecursionError where it is no JSON, or holds an absurd number."""
    return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def shown(value: object) -> str:
    """A value as a message shows it: JSON, of which a long one is cut off."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "what is nested too deep to show"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def names_a_file(name: str) -> bool:
    """Whether a file beside the one that names it can have this name."""
    try:
        return Path(name).name == name not in {"", ".."} and "\0" not in name and len(os.fsencode(name)) <= MOST_NAME
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that the file holds."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; fetch it again") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits and endless nesting among them
        raise ConfigError(f"{path} is not valid JSON ({error}); if it was cut short, fetch it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {shown(content)}")
    return content


class JsonReader:
    """One JSON object of a file; ``prefix`` is its own place in the file, such as "rope_scaling."."""

    def __init__(self, path: Path, content: Mapping[str, Any], prefix: str = "") -> None:
        """Wrap what ``read_json`` returned."""
        self.path = path
        self.content = content
        self.prefix = prefix

    def error(self, key: str, message: str) -> ConfigError:
        """Return the error to raise about ``key``."""
        return ConfigError(f"{self.path}: {self.prefix}{key} {message}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.content.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an int; absent or null gives the default, if there is one."""
        value = self.content.get(key, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, {self._found(key)}")
        return value

    def number(self, key: str) -> float:
        """Return a finite float; an int will do."""
        value = self.content.get(key)
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
        except OverflowError:  # an int beyond float64
            number = math.inf
        if not math.isfinite(number):
            raise self.error(key, f"must be a finite number, {self._found(key)}")
        return number

    def boolean(self, key: str) -> bool:
        """Return a bool; absent or null means false."""
        value = self.content.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"must be true or false, {self._found(key)}")
        return bool(value)

    def text(self, key: str) -> str:
        """Return a string."""
        value = self.content.get(key)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, {self._found(key)}")
        return value

    def section(self, key: str) -> JsonReader:
        """Return a nested object; absent or null is an empty one."""
        value = self.content.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, f"must be an object, {self._found(key)}")
        return JsonReader(self.path, value or {}, f"{self.prefix}{key}.")

    def integers(self, key: str) -> tuple[int, ...]:
        """Return what is written as one integer or as a list of them; absent or null is an empty list."""
        value = self.content.get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in listed):
            raise self.error(key, f"must be an integer or a list of integers, {self._found(key)}")
        return tuple(listed)

    def _found(self, key: str) -> str:
        return f"not {shown(self.content[key])}" if key in self.content else "but is missing"
