#!/usr/bin/env python3
"""Makes test/fixtures/parquet and the seeds of the fuzz target parquet.          needs: pyarrow

    scripts/parquet_fixtures.py

Small files in the shapes that public corpora have, and rows.json with what pyarrow reads from them.
"""
import json
import sys
from pathlib import Path

if sys.argv[1:] == ["--help"]:
    sys.exit(print(__doc__))

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "test/fixtures/parquet"
SEEDS = ROOT / "test/fuzz/seeds/parquet"
CODECS = {"none": 0, "snappy": 1, "gzip": 2, "zstd": 6, "lz4": 7}
WORDS = ["", None, "a text", "a text that is longer", "caf\u00e9 \U0001f600\n\"quoted\"",
         "\u4e2d\u6587", "again"]
ROWS = [word for i in range(12) for word in WORDS[i % 3:]] + [None] * 9
SHAPES = {
    "snappy": {"compression": "snappy"},
    "gzip": {"compression": "gzip", "data_page_version": "2.0"},
    "zstd": {"compression": "zstd", "use_dictionary": False},
    "lz4": {"compression": "lz4", "row_group_size": 13},
    "plain": {"compression": "none", "use_dictionary": False, "data_page_size": 100,
              "write_batch_size": 7},
    "dictionary": {"compression": "none", "data_page_size": 100, "write_page_checksum": True},
    "delta-length": {"compression": "none", "use_dictionary": False,
                     "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"}},
    "delta-bytes": {"compression": "none", "use_dictionary": False,
                    "column_encoding": {"text": "DELTA_BYTE_ARRAY"}, "data_page_version": "2.0"},
}


def write(path, rows, layout, others=True):
    columns = {"text": pa.array(rows, pa.string())}
    if others:
        columns = {"id": pa.array(range(len(rows)), pa.int64()),
                   "tags": pa.array([["a"]] * len(rows))} | columns
        if "column_encoding" in layout:
            layout = layout | {
                "column_encoding": {"id": "PLAIN", "tags.list.element": "PLAIN"} |
                                   layout["column_encoding"]}
    pq.write_table(pa.table(columns), path, store_schema=False, write_statistics=False, **layout)


FIXTURES.mkdir(parents=True, exist_ok=True)
SEEDS.mkdir(parents=True, exist_ok=True)
expected = {}
for name, layout in SHAPES.items():
    path = FIXTURES / f"{name}.parquet"
    write(path, ROWS, layout)
    expected[path.name] = {"codec": CODECS[layout["compression"]],
                           "rows": pq.read_table(path).column("text").to_pylist()}
    write(SEEDS / f"valid-{name}" if layout["compression"] == "none" else SEEDS / f"packed-{name}",
          ROWS[:20], layout, others=False)
(SEEDS / "bad-magic").write_bytes(b"PAR1 and no more than this")
(FIXTURES / "rows.json").write_text(json.dumps(expected, ensure_ascii=False, indent=1) + "\n",
                                    encoding="utf-8")
