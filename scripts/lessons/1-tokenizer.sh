#!/usr/bin/env bash
# Lesson 1: the tokenizer
#
# A model does not read letters. It reads tokens: numbers that stand for pieces of text. Byte-pair
# encoding makes the pieces from a text. It begins with the 256 bytes. Again and again it joins the
# two neighbours that occur together most often, until the vocabulary is as large as wanted.
#
# A larger vocabulary has longer pieces, so that a text has fewer tokens and a model has less to
# compute for it. But each token needs a row of weights of its own, and rare tokens are seen too
# seldom to be learned. This lesson makes four vocabularies of one text. With 257 tokens, the bytes
# and a mark between documents, a token is one byte. With 4,096 it is almost four.

# shellcheck source=scripts/lessons/common.sh
. "$(dirname "$0")/common.sh"

for size in 257 512 4096 16384; do
    shards "$size"
    bytes=$(sed -n 's/^val: .* tokens (\([0-9.]*\) bytes each).*/\1/p' "$work/tokenize-$size.log")
    measured "bytes of a token with a vocabulary of $size" "$bytes"
    measured "weights of the embedding of $size vectors of 128" $((size * 128))
done

cat <<'END'

From 512 to 4,096 tokens a piece becomes longer by more than half, and from 4,096 to 16,384 by a
tenth only: the frequent words are already one token each. Large models choose 50,000 to 200,000,
since their texts have more words and languages, and the rows of the vocabulary are a small part
of their weights. Compare losses of models with different vocabularies by bits per byte: lesson 2.
END
