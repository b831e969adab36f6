"""Documents as word numbers: contrib.learn.preprocessing of r1.15, whose rules and doctests these are."""

import pathlib
import pickle

import numpy as np
import pytest

import harness.tf1 as tf

learn = tf.contrib.learn.preprocessing
TEXTS = ["the cat's tail, the dog", "a dog of XMLParser-type", "the cat"]


def test_texts_are_split_into_words() -> None:
    """Words keep apostrophes and hyphens, and CamelCase is split."""
    assert list(learn.tokenizer(TEXTS[:2])) == [
        ["the", "cat's", "tail", "the", "dog"],
        ["a", "dog", "of", "XML", "Parser-type"],
    ]
    assert list(learn.tokenizer(["ABCdef HTTP fooBar MyWord"])) == [
        ["AB", "Cdef", "HTTP", "fooBar", "My", "Word"]
    ]


def test_documents_become_rows() -> None:
    """Words are numbered in the order they come, rows are cut off and filled up, unknown words are 0."""
    processor = learn.VocabularyProcessor(4)
    rows = np.array(list(processor.fit_transform(TEXTS)))
    assert rows.tolist() == [[1, 2, 3, 1], [5, 4, 6, 7], [1, 9, 0, 0]]
    assert rows.dtype == np.int64 and len(processor.vocabulary_) == 10
    assert next(processor.transform(["dog eats cat"])).tolist() == [4, 0, 9, 0]
    assert list(processor.reverse([[1, 9, 0]])) == ["the cat <UNK>"]


def test_rare_words_are_trimmed() -> None:
    """The words above a frequency are numbered by it, and then by the alphabet."""
    processor = learn.VocabularyProcessor(5, min_frequency=1).fit(TEXTS)
    assert [processor.vocabulary_.reverse(i) for i in range(3)] == ["<UNK>", "the", "dog"]
    vocabulary = learn.CategoricalVocabulary(support_reverse=False)
    for word, count in (("b", 2), ("a", 2), ("c", 5), ("d", 3)):
        vocabulary.add(word, count)
    vocabulary.trim(1, 5)
    assert [vocabulary.get(word) for word in "dab"] == [1, 2, 3]
    with pytest.raises(ValueError, match="support_reverse"):
        vocabulary.reverse(1)


def test_processor_is_restored(tmp_path: pathlib.Path) -> None:
    """A saved processor is restored; a pickle is not read, and a tokenizer not saved."""
    path = tmp_path / "vocabulary"
    processor = learn.VocabularyProcessor(3).fit(TEXTS)
    processor.save(str(path))
    again = learn.VocabularyProcessor.restore(str(path))
    assert [r.tolist() for r in again.transform(TEXTS)] == [
        r.tolist() for r in processor.transform(TEXTS)
    ]
    path.write_bytes(pickle.dumps({"words": []}))
    with pytest.raises(ValueError, match="fit it anew"):
        learn.VocabularyProcessor.restore(str(path))
    with pytest.raises(ValueError, match="tokenizer_fn is not saved"):
        learn.VocabularyProcessor(3, tokenizer_fn=lambda texts: map(str.split, texts)).save(
            str(path)
        )
