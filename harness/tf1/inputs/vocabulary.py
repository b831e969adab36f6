"""``tf.contrib.learn.preprocessing``: documents as rows of word numbers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.tf1.ops.lift import Public

public = Public("tf.contrib.learn.preprocessing")

Tokenizer = Callable[[Iterable[str]], Iterable[list[str]]]

# TensorFlow's: runs of capitals, the parts of CamelCase, and words with apostrophes and hyphens.
_WORD = re.compile(r"[A-Z]{2,}(?![a-z])|[A-Z][a-z]+(?=[A-Z])|[\'\w\-]+")


@public.add()
def tokenizer(iterator: Iterable[str]) -> Iterator[list[str]]:
    """Yields the words of each text."""
    yield from map(_WORD.findall, iterator)


@public.add()
class CategoricalVocabulary:
    """Numbers of words, from 1; 0 is for words that are not there.

    Args:
        unknown_token: stands for these words.
        support_reverse: must be True to ask for the word of a number.
    """

    def __init__(self, unknown_token: str = "<UNK>", support_reverse: bool = True) -> None:
        self._support_reverse = support_reverse
        # In the order of the numbers, as Python keeps it.
        self._mapping: dict[Any, int] = {unknown_token: 0}
        self._frequency: Counter[Any] = Counter()
        self._frozen = False

    def __len__(self) -> int:
        """Returns the number of words, the unknown one among them."""
        return len(self._mapping)

    def freeze(self, freeze: bool = True) -> None:
        """Takes no further words; False takes them again."""
        self._frozen = freeze

    def get(self, category: Any) -> int:
        """Returns the number of a word, which is new where the vocabulary is not frozen."""
        if self._frozen:
            return self._mapping.get(category, 0)
        return self._mapping.setdefault(category, len(self._mapping))

    def add(self, category: Any, count: int = 1) -> None:
        """Counts a word."""
        if self.get(category) > 0:
            self._frequency[category] += count

    def trim(self, min_frequency: int, max_frequency: int = -1) -> None:
        """Keeps words seen more than ``min_frequency`` times, and numbers them anew, the most frequent first.

        Words seen ``max_frequency`` times or more go too, where that is above 0.
        """
        kept = {
            word: count
            for word, count in self._frequency.items()
            if count > min_frequency and not 0 < max_frequency <= count
        }
        order = sorted(kept, key=lambda word: (-kept[word], isinstance(word, str), word))
        unknown = next(iter(self._mapping))
        self._mapping = {word: number for number, word in enumerate([unknown, *order])}
        self._frequency = Counter(kept)

    def reverse(self, class_id: int) -> Any:
        """Returns the word of a number. Raises ValueError without ``support_reverse``."""
        if not self._support_reverse:
            raise ValueError(
                "This vocabulary wasn't initalized with support_reverse to support reverse() "
                "function."
            )
        return list(self._mapping)[class_id]


@public.add()
class VocabularyProcessor:
    """Turns documents into rows of word numbers.

    Args:
        max_document_length: longer documents are cut off, shorter ones filled up with 0.
        min_frequency: words seen so many times or less are unknown.
        vocabulary: one that is there already.
        tokenizer_fn: makes lists of words of texts.
    """

    def __init__(
        self,
        max_document_length: int,
        min_frequency: int = 0,
        vocabulary: CategoricalVocabulary | None = None,
        tokenizer_fn: Tokenizer | None = None,
    ) -> None:
        self.max_document_length, self.min_frequency = max_document_length, min_frequency
        self.vocabulary_ = vocabulary or CategoricalVocabulary()
        self._tokenizer = tokenizer_fn or tokenizer

    def fit(self, raw_documents: Iterable[str], unused_y: object = None) -> VocabularyProcessor:
        """Learns the words of documents; returns the processor."""
        for tokens in self._tokenizer(raw_documents):
            for token in tokens:
                self.vocabulary_.add(token)
        if self.min_frequency > 0:
            self.vocabulary_.trim(self.min_frequency)
        self.vocabulary_.freeze()
        return self

    def fit_transform(
        self, raw_documents: Iterable[str], unused_y: object = None
    ) -> Iterator[NDArray[np.int64]]:
        """Learns the words of documents; yields a row for each document."""
        self.fit(raw_documents)
        return self.transform(raw_documents)

    def transform(self, raw_documents: Iterable[str]) -> Iterator[NDArray[np.int64]]:
        """Yields a row for each document."""
        for tokens in self._tokenizer(raw_documents):
            row = np.zeros(self.max_document_length, np.int64)
            numbers = [self.vocabulary_.get(token) for token in tokens[: len(row)]]
            row[: len(numbers)] = numbers
            yield row

    def reverse(self, documents: Iterable[Iterable[int]]) -> Iterator[str]:
        """Yields the words of each row."""
        for numbers in documents:
            yield " ".join(str(self.vocabulary_.reverse(number)) for number in numbers)

    def save(self, filename: str) -> None:
        """Writes the processor as JSON, not as TensorFlow's pickle, which runs code when it is read.

        Raises ValueError for a tokenizer of the program's own, which JSON cannot hold.
        """
        if self._tokenizer is not tokenizer:
            raise ValueError(
                "VocabularyProcessor.save: a tokenizer_fn is not saved: save list(vocabulary_), and "
                "make the processor anew"
            )
        vocabulary = self.vocabulary_
        content = {
            "max_document_length": self.max_document_length,
            "min_frequency": self.min_frequency,
            "words": list(vocabulary._mapping),
            "counts": list(vocabulary._frequency.items()),
            "reverse": vocabulary._support_reverse,
            "frozen": vocabulary._frozen,
        }
        with open(filename, "w") as file:
            json.dump(content, file)

    @classmethod
    def restore(cls, filename: str) -> VocabularyProcessor:
        """Reads what ``save`` has written. Raises ValueError for another file, such as TensorFlow's pickle."""
        with open(filename, "rb") as file:
            try:
                content = json.load(file)
            except ValueError as error:
                raise ValueError(
                    f"{filename} was not written by VocabularyProcessor.save here: fit it anew"
                ) from error
        words = content["words"]
        vocabulary = CategoricalVocabulary(words[0], content["reverse"])
        vocabulary._mapping = {word: number for number, word in enumerate(words)}
        vocabulary._frequency = Counter(dict(content["counts"]))
        vocabulary.freeze(content["frozen"])
        return cls(content["max_document_length"], content["min_frequency"], vocabulary)
