"""Reads data files once and notes for every example what each check finds; then compares the examples with each other.

It keeps only numbers of an example, about 130 bytes, and reads its text again where needed.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from train.data.check import Count, count_left_out, estimate_tokens
from train.data.formats import BadRecord, NoAnswer, Record, shape_of
from train.data.lines import Example, examples, parse
from train.data_checks import likeness, personal_data
from train.data_checks.contamination import ValidationIndex
from train.data_checks.languages import UNSURE, Languages
from train.data_checks.listed_words import Toxic, of_file
from train.data_checks.options import CHECKS, CheckOptions
from train.data_checks.texts import Texts, texts_of
from train.data_checks.words import grams, words_of

Convert = Callable[[Record, str], Record]
BIT = {name: 1 << place for place, name in enumerate(CHECKS)}
MOST_SHOWN = 20
_SHAPES_OF = 100  # examples, by which the shape of a file is known
# The tokens of the first examples are all counted, then those of one in this many, and of all that may be too long.
COUNTED_EXAMPLES, COUNTED_EACH = 2000, 50
# The language of the first examples is found, then of one in this many.
TOLD_EXAMPLES, TOLD_EACH = 100_000, 10
_ODD_LANGUAGE_SHARE = 0.02
_TIMES_AS_LONG = 3
# Recently compared texts are not read again, except texts longer than this.
_KEPT_BYTES, _MOST_KEPT = 1 << 16, 1024
_TEMPLATE_BYTES, _MESSAGE_BYTES = 512, 64  # what a chat template adds, at the least that is reckoned with
_CONTROL = re.compile("(?P<control>[\x00-\x08\x0b\x0c\x0e-\x1f\x7f])")
_ODD = re.compile(
    _CONTROL.pattern + "|(?P<replaced>\ufffd)|(?P<mojibake>[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac)"
    "|(?P<chinese>(?!(?P<same>.)(?P=same))(?:[\u00b0-\u00f7][\u00a1-\u00fe]){4})"
    "|(?P<invisible>[\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff])"
)
_WHAT_IS_ODD = {
    "control": "a control character",
    "replaced": "U+FFFD, which stands for a character that was lost",
    "mojibake": "UTF-8 that was read as Latin-1",
    "chinese": "Chinese (GBK) that was read as Latin-1",
    "invisible": "an invisible character",
}


class SourceLine(NamedTuple):
    """The line of a source that has an example."""

    source: int
    line: int


class Findings:
    """In how many examples a check found something, how often each kind, and the first finds, in words."""

    def __init__(self) -> None:
        self.count = 0
        self.kinds: Counter[str] = Counter()
        self.shown: list[dict[str, Any]] = []

    def add(self, place: SourceLine, **detail: Any) -> None:
        self.count += 1
        if len(self.shown) < MOST_SHOWN:
            self.shown.append({"source": place.source, "line": place.line, **detail})


def _usual_shape(first: Iterable[Example]) -> str | None:
    """The shape that most of these have; None if none has any."""
    seen: Counter[str] = Counter()
    for example in first:
        with suppress(BadRecord):
            if not isinstance(example.raw, BadRecord):
                seen[shape_of(parse(example.raw))] += 1
    return max(seen, key=seen.__getitem__, default=None)


class Source:
    """A file of a scan, open to be read again; `name` is what a report calls it."""

    def __init__(self, path: Path, name: str):
        self.path, self.name, self.file = path, name, open(path, "rb")  # noqa: SIM115 closed by Scan.close
        self.shape: str | None = None
        self.sha256 = ""
        self.bytes = 0

    def raw(self, offset: int, length: int) -> bytes:
        self.file.seek(offset)
        return self.file.read(length)


class Scan:
    """Everything that is known of the examples of one or several files. `read` each, then `compare`; `close` it.

    For each example, in the order in which they were read: `source`, `line`, `offset`, `length`, `flags` (bits of BIT),
    `tokens`. of: what an example repeats or nearly repeats, by its index.
    """

    def __init__(self, options: CheckOptions, convert: Convert, count: Count | None, max_tokens: int | None):
        self._options, self._convert, self._count, self.max_tokens = options, convert, count, max_tokens
        self.sources: list[Source] = []
        self.source, self.line, self.offset = array("H"), array("Q"), array("Q")
        self.length, self.flags, self._digests = array("I"), array("H"), bytearray()
        self._bands, self._sizes, self.tokens = bytearray(), array("I"), array("I")
        self._kept_grams: dict[int, np.ndarray] = {}
        self.of: dict[int, int] = {}
        self.found = {name: Findings() for name in CHECKS}
        self.languages: Counter[str] = Counter()
        self.left_out: dict[str, int] = {}
        self.counted, self._counted_tokens, self._counted_estimate = 0, 0, 0
        self._told: list[tuple[SourceLine, str]] = []
        self.against_sha256: str | None = None
        self._template_bytes = max(_TEMPLATE_BYTES, _template_tokens(count))
        self._languages = Languages() if options.does("language") else None
        self._toxic = Toxic() if options.does("toxic") else None
        self._own_words = of_file(options.words) if options.words else None
        self._index = self._validation_index(options.against) if options.against else None

    def __len__(self) -> int:
        return len(self.flags)

    def close(self) -> None:
        for source in self.sources:
            source.file.close()

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, path: Path, name: str | None = None) -> Source:
        """Note for every example of a file what can be found in it alone. Raises OSError."""
        number, source = len(self.sources), Source(path, name or str(path))
        self.sources.append(source)
        with open(path, "rb") as file:
            source.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            source.bytes = file.tell()
            file.seek(0)
            source.shape = _usual_shape(islice(examples(file), _SHAPES_OF))
            file.seek(0)
            for example in examples(file):
                self._example(number, source, example)
        return source

    def _example(self, number: int, source: Source, example: Example) -> None:
        index, place = len(self), SourceLine(number, example.line)
        self.source.append(number)
        self.line.append(example.line)
        self.offset.append(example.offset)
        self.length.append(0 if isinstance(example.raw, BadRecord) else len(example.raw))
        self.flags.append(0)
        try:
            made = self._converted(source, example)
        except BadRecord as bad:
            if isinstance(bad, NoAnswer) and self._options.does("empty"):
                self._flag("empty", index, place)
            else:
                self._flag("bad_lines", index, place, reason=str(bad)[:300])
            made = None
        if made is None:
            self._digests += bytes(16)
            self._bands += bytes(4 * likeness.BANDS if self._options.does("near_duplicates") else 0)
            self._sizes.append(0)
            self.tokens.append(0)
            return
        canonical = orjson.dumps(made, option=orjson.OPT_SORT_KEYS)
        self._digests += hashlib.blake2b(canonical, digest_size=16).digest()
        self.tokens.append(self._tokens(index, place, made))
        self._look_at(index, place, texts_of(made))

    def _converted(self, source: Source, example: Example) -> Record:
        """Raises BadRecord; NoAnswer for an example without an answer."""
        record = parse(_readable(example))
        shape = shape_of(record)
        if (source.shape, shape) == ("chat", "prompt"):
            shape = "chat"
        source.shape = source.shape or shape
        if shape != source.shape:
            raise BadRecord(f"has the shape {shape!r}; most of the file's first lines are {source.shape!r}")
        made = self._convert(record, shape)
        count_left_out(self.left_out, record, shape)
        return made

    def _flag(self, check: str, index: int, place: SourceLine, **detail: Any) -> None:
        self.flags[index] |= BIT[check]
        self.found[check].add(place, **detail)

    def _look_at(self, index: int, place: SourceLine, text: Texts) -> None:
        does = self._options.does
        if does("encoding") and (odd := (_CONTROL if text.body.isascii() else _ODD).search(text.body)):
            kind = str(odd.lastgroup)
            self.found["encoding"].kinds[kind] += 1
            self._flag("encoding", index, place, reason=_WHAT_IS_ODD[kind], near=_around(text.body, odd.start()))
        words = words_of(text.body) if self._compares else np.empty(0, np.uint64)
        self._sizes.append(len(words))
        if does("near_duplicates"):
            self._bands += likeness.bands_of(grams(words, likeness.GRAM)).tobytes()
        if self._index is not None and (overlap := self._index.overlap(words)):
            self._flag("contaminated", index, place, of=overlap.of, share=round(overlap.share, 2))
        language = self._language(index, place, text)
        if does("toxic"):
            word = self._own_words.find(words) if self._own_words else None
            if word or (word := self._toxic.find(words, language) if self._toxic else None):
                self.found["toxic"].kinds[word] += 1
                self._flag("toxic", index, place, word=word)
        if does("personal_data"):
            self._personal_data(index, place, text)

    @property
    def _compares(self) -> bool:
        does = self._options.does
        return does("near_duplicates") or does("toxic") or self._index is not None

    def _language(self, index: int, place: SourceLine, text: Texts) -> str | None:
        """The language of an example; if it was not detected, that of most others."""
        if self._languages is None:
            return None
        if index >= TOLD_EXAMPLES and index % TOLD_EACH:
            return self.languages.most_common(1)[0][0] if self.languages else None
        language = self._languages.of(text.answer) or self._languages.of(text.body)
        if language is not None:
            self.languages[language] += 1
            # Which languages are rare is known only at the end; the first example of a language may be rare.
            if self.languages[language] <= MOST_SHOWN:
                self._told.append((place, language))
        return language

    def _personal_data(self, index: int, place: SourceLine, text: Texts) -> None:
        found = self.found["personal_data"]
        for part in (text.body, text.system):
            for one in personal_data.find(part):
                found.kinds[one.kind] += 1
                if not self.flags[index] & BIT["personal_data"]:
                    self._flag("personal_data", index, place, kind=one.kind, value=personal_data.hinted(part, one))

    def _tokens(self, index: int, place: SourceLine, made: Record) -> int:
        """The tokens of an example: counted, or estimated from its bytes by the ratio of those that were counted."""
        chats = made.get("sequences", (made,))
        estimates = [estimate_tokens(chat) for chat in chats]
        # No tokenizer makes more tokens of a text than it has bytes.
        may_be_long = (
            self.max_tokens is not None and max(map(_bytes_of, chats)) + self._template_bytes > self.max_tokens
        )
        wanted = (
            index < COUNTED_EXAMPLES or index % COUNTED_EACH == 0 or (may_be_long and self._options.does("too_long"))
        )
        if self._count is None or not wanted:
            factor = self._counted_tokens / self._counted_estimate if self._counted_estimate else 1.0
            tokens = [int(estimate * factor) for estimate in estimates]
        else:
            try:
                tokens = [length for row in self._count(made) for length in row]
            except BadRecord as bad:
                self._flag("bad_lines", index, place, reason=str(bad)[:300])
                tokens = estimates
            self.counted += 1
            self._counted_tokens += sum(tokens)
            self._counted_estimate += max(1, sum(estimates))
        if self.max_tokens is not None and self._options.does("too_long") and max(tokens) > self.max_tokens:
            self._flag("too_long", index, place, tokens=max(tokens))
        return sum(tokens)

    def _validation_index(self, path: Path) -> ValidationIndex:
        index = ValidationIndex()
        with open(path, "rb") as file:
            self.against_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            shape = None
            for example in examples(file):
                try:
                    record = parse(_readable(example))
                    shape = shape or shape_of(record)
                    made = self._convert(record, shape_of(record))
                except BadRecord:
                    continue  # the check of that file is what says so
                index.add(example.line, words_of(texts_of(made).body))
        index.close()
        return index

    # -- comparing ---------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Find examples that repeat an earlier one, and which languages are rare."""
        if self._options.does("duplicates"):
            self._duplicates()
        if self._options.does("near_duplicates"):
            self._near_duplicates()
        total = sum(self.languages.values())
        odd = {name for name, n in self.languages.items() if n < _ODD_LANGUAGE_SHARE * total and name != UNSURE}
        for place, language in self._told:
            if language in odd:
                self.found["language"].add(place, language=language)
        self.found["language"].count = sum(self.languages[name] for name in odd)

    def place(self, index: int) -> SourceLine:
        return SourceLine(self.source[index], self.line[index])

    def root(self, index: int) -> int:
        """The example that stays among its duplicates and near duplicates; itself if it has none."""
        while index in self.of:
            index = self.of[index]
        return index

    def usable(self) -> np.ndarray:
        """Indices of examples that are no bad lines and say something."""
        return np.flatnonzero((np.frombuffer(self.flags, np.uint16) & (BIT["bad_lines"] | BIT["empty"])) == 0)

    def digests(self) -> np.ndarray:
        """(n, 2) uint64: what examples of the same content share."""
        return np.frombuffer(bytes(self._digests), np.uint64).reshape(-1, 2)

    def _duplicates(self) -> None:
        usable, digests = self.usable(), self.digests()
        order = usable[np.lexsort((usable, digests[usable, 1], digests[usable, 0]))]
        same = np.zeros(len(order), bool)
        same[1:] = (digests[order[1:]] == digests[order[:-1]]).all(axis=1)
        first = order[np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))] if len(order) else order
        for index, of in sorted(zip(order[same].tolist(), first[same].tolist(), strict=True)):
            self.of[index] = of
            self._flag("duplicates", index, self.place(index), **self._told_of(of))

    def _near_duplicates(self) -> None:
        flags = np.frombuffer(self.flags, np.uint16)
        members = np.flatnonzero((flags & (BIT["bad_lines"] | BIT["empty"] | BIT["duplicates"])) == 0)
        bands = np.frombuffer(self._bands, np.uint32).reshape(-1, likeness.BANDS)
        pairs = likeness.near_duplicates(bands, members, self._likeness, self._options.like)
        del flags, bands  # an array cannot grow under a view
        for index, of, alike in pairs:
            self.of[index] = of
            self._flag("near_duplicates", index, self.place(index), likeness=round(alike, 2), **self._told_of(of))

    def _told_of(self, index: int) -> dict[str, Any]:
        place = self.place(index)
        return {"of": place.line} if len(self.sources) == 1 else {"of": place.line, "of_source": place.source}

    def _likeness(self, one: int, other: int) -> float:
        """0 without reading if one has many times as many words as the other: otherwise a file could be made in which
        many short examples share a band with a long one, and each would cause it to be read again."""
        if max(self._sizes[one], self._sizes[other]) > _TIMES_AS_LONG * min(self._sizes[one], self._sizes[other]):
            return 0.0
        return likeness.likeness(self._grams(one), self._grams(other))

    def _grams(self, index: int) -> np.ndarray:
        found = self._kept_grams.get(index)
        if found is None:
            found = grams(words_of(texts_of(self.made(index)).body), likeness.GRAM)
            if found.nbytes <= _KEPT_BYTES:
                if len(self._kept_grams) == _MOST_KEPT:
                    del self._kept_grams[next(iter(self._kept_grams))]
                self._kept_grams[index] = found
        return found

    def raw(self, index: int) -> bytes:
        """The bytes of an example, without the end of its line."""
        return self.sources[self.source[index]].raw(self.offset[index], self.length[index]).strip(b"\r\n")

    def record(self, index: int) -> Record:
        """An example as it stands in its file."""
        return parse(self.raw(index))

    def made(self, index: int) -> Record:
        """An example as it is converted for a run."""
        return self._convert(self.record(index), str(self.sources[self.source[index]].shape))


def _readable(example: Example) -> bytes:
    if isinstance(example.raw, BadRecord):
        raise example.raw
    return example.raw


def _bytes_of(chat: Record) -> int:
    return len(orjson.dumps(chat)) + _MESSAGE_BYTES * len(chat["messages"])


def _template_tokens(count: Count | None) -> int:
    """How many tokens a chat template adds to an empty example; some templates begin with a page of instructions."""
    if count is None:
        return 0
    try:
        rows = count({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]})
        return max(length for row in rows for length in row)
    except BadRecord:  # it wants more of an example; those of the file will do
        return 0


def _around(text: str, at: int) -> str:
    return text[max(0, at - 20) : at + 20]
