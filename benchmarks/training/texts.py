"""The public-domain texts that tiny-v4 learns from, read out of Debian packages.

| package (Debian main) | text | licence of the text |
|---|---|---|
| r-cran-janeaustenr | Jane Austen's six novels | public domain, copyright expired |
| sword-text-web | World English Bible | dedicated to the public domain; the name is a trademark |
| dict-devil | The Devil's Dictionary (Ambrose Bierce, 1911) | public domain, copyright expired |
| dict-jargon | The Jargon File 4.4.7 | dedicated to the public domain |

Only the texts are read; the packages' own code (MIT, GPL) is not. Without packages there are the
chapters of "Persuasion" that the project ships (deploy/texts/NOTICE).
"""

from __future__ import annotations

import gzip
import html
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sluice.deploy.commands.prose import paragraphs
from sluice.protocol.messages import ConfigError

PACKAGES = ("r-cran-janeaustenr", "sword-text-web", "dict-devil", "dict-jargon")

# Where the packages put their files.
NOVELS = Path("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
BIBLE = Path("usr/share/sword/modules/texts/ztext/engWEB2015eb")
DICTIONARIES = Path("usr/share/dictd")

MIN_BOOK_CHARACTERS = 2_000  # less is a title page
MIN_ANSWER_CHARACTERS = 20  # less is a reference to another word
R_STRING = 9  # type of a string in R's serialization, in the low byte of its flags
R_ASCII_STRING = struct.pack(">I", 0x00040000 | R_STRING)
BASE64_PLACES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
ASCII = str.maketrans(
    {"“": '"', "”": '"', "’": "'", "‘": "'", "—": "--", "–": "-", "\u00ad": None, "_": None}
)


@dataclass(frozen=True)
class Texts:
    """Books, one paragraph a line, and dialogues of a question and its answer."""

    books: tuple[str, ...]
    dialogues: tuple[tuple[str, str], ...] = ()

    def passages(self) -> Iterator[str]:
        yield from self.books
        for question, answer in self.dialogues:
            yield f"{question} {answer}"


def shipped_texts() -> Texts:
    """The chapters that come with the project."""
    return Texts(books=("\n".join(paragraphs()),))


def packaged_texts(folder: Path) -> Texts:
    """Texts of the packages in `folder`: .deb files, or a root they are installed under ("/").

    Takes those of PACKAGES that are there. Raises ConfigError if none is, or a .deb does not open.
    """
    with tempfile.TemporaryDirectory() as unpacked:
        for archive in sorted(folder.glob("*.deb")):
            if archive.name.split("_")[0] in PACKAGES:
                _unpack(archive, Path(unpacked))
        found = [_read_root(root) for root in (folder, Path(unpacked))]
    texts = Texts(
        books=tuple(book for texts in found for book in texts.books),
        dialogues=tuple(pair for texts in found for pair in texts.dialogues),
    )
    if not texts.books:
        raise ConfigError(
            f"--texts is {folder}: no books there; expected r-cran-janeaustenr or sword-text-web, "
            f"as .deb files (apt-get download {' '.join(PACKAGES)}) or installed below that folder"
        )
    return texts


def _unpack(archive: Path, root: Path) -> None:
    command = ["dpkg-deb", "--extract", str(archive), str(root)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{archive}: dpkg-deb is not here to open it; unpack it elsewhere and give that folder"
        ) from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{archive}: {error.stderr.strip()}; download it again") from error


def _read_root(root: Path) -> Texts:
    books, dialogues = [], []
    if (root / NOVELS).exists():
        books += list(_novels(root / NOVELS))
    for testament in ("ot", "nt"):
        if (root / BIBLE / f"{testament}.bzs").exists():
            books += list(_bible_books(root / BIBLE, testament))
    for name, question in (("devil", "Define {}."), ("jargon", "What is {}?")):
        if (root / DICTIONARIES / f"{name}.index").exists():
            dialogues += list(_definitions(root / DICTIONARIES, name, question))
    return Texts(books=tuple(books), dialogues=tuple(dialogues))


def _novels(path: Path) -> Iterator[str]:
    """An R data base: records of a length, then a zlib stream that holds one vector of lines."""
    data = path.read_bytes()
    while len(data) > 4:
        stream = zlib.decompressobj()
        record = stream.decompress(data[4:])  # the first four bytes are its unpacked length
        data = stream.unused_data
        blocks = re.split(r"\n\s*\n", "\n".join(_r_strings(record)))
        yield "\n".join(_one_line(block) for block in blocks if block.strip())


def _r_strings(record: bytes) -> Iterator[str]:
    """Strings of a serialized R vector: flags, length and bytes, one behind the other."""
    place = record.index(R_ASCII_STRING)
    while place + 8 <= len(record):
        flags, length = struct.unpack_from(">Ii", record, place)
        if flags & 0xFF != R_STRING:
            return
        place += 8 + max(length, 0)  # -1 is R's missing value
        yield record[place - max(length, 0) : place].decode("utf-8", "replace")


def _bible_books(folder: Path, testament: str) -> Iterator[str]:
    """A SWORD module: an index of (offset, packed, unpacked length), zlib blocks of OSIS markup."""
    index = (folder / f"{testament}.bzs").read_bytes()
    blocks = (folder / f"{testament}.bzz").read_bytes()
    for offset, packed, _ in struct.iter_unpack("<III", index):
        markup = zlib.decompress(blocks[offset : offset + packed]).decode("utf-8", "replace")
        book = _without_markup(markup)
        if len(book) >= MIN_BOOK_CHARACTERS:
            yield book


def _without_markup(markup: str) -> str:
    """A paragraph a line, without notes and headings."""
    text = re.sub(r"<note\b.*?</note>", "", markup, flags=re.DOTALL)
    text = re.sub(r"<title\b.*?</title>|<div eID=\"[^\"]*\" type=\"x-p\"/>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]*>", "", text)).replace("\x00", " ")
    return "\n".join(_one_line(line) for line in text.split("\n") if line.strip())


def _definitions(folder: Path, name: str, question: str) -> Iterator[tuple[str, str]]:
    """A dictd dictionary: lines of (word, offset, length) in base 64, and a gzipped body."""
    with gzip.open(folder / f"{name}.dict.dz") as file:
        body = file.read()
    for line in (folder / f"{name}.index").read_text(encoding="utf-8").splitlines():
        word, offset, length = line.split("\t")[:3]
        if word.startswith("00database"):
            continue
        start = _base64_number(offset)
        article = body[start : start + _base64_number(length)].decode("utf-8", "replace")
        answer = _definition(article)
        if len(answer) > MIN_ANSWER_CHARACTERS:
            yield question.format(word), answer


def _base64_number(digits: str) -> int:
    value = 0
    for digit in digits.encode():
        value = value * 64 + BASE64_PLACES.index(digit)
    return value


def _definition(article: str) -> str:
    """An article without its head: the word, how it is said, its part of speech."""
    head, _, rest = article.partition("\n")
    if "," in head:  # ABATIS, n.  Rubbish in front of a fort ...
        text = re.sub(r"^[^,]+,\s*(?:[a-z.]+\.\s*)?", "", article)
    else:  # the word, then /pronunciation/, part of speech
        text = re.sub(r"^ ?/[^\n]*\n", "", rest)
    return _one_line(re.sub(r"[{}]", "", text))


def _one_line(text: str) -> str:
    return " ".join(text.translate(ASCII).split())
