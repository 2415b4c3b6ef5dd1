"""Checks the io rows of `io/odd_tensors.py`: odd_tensors.py TRACE."""

import csv
import sys

with open(sys.argv[1], newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
known = {}
for row in rows:
    if row["event"] == "mark" and row["name"].startswith("odd:"):
        _, name, addr, size = row["name"].split(":")
        known[name] = addr, size
io = [row for row in rows if row["event"] == "io"]


def uses(name, op):
    addr, size = known[name]
    found = [row for row in io if row["addr"] == addr and row["op"] == op]
    for row in found:
        assert row["requested_bytes"] == size, row
        assert row["alloc_id"] != "0", row
        assert row["delta_bytes"] == "0", row
        assert row["device"] == ("-2" if name == "host" else "0"), row
    return {row["api"] for row in found}


assert uses("a", "aten::_foreach_add_") == {"read_write"}
assert uses("b", "aten::_foreach_add_") == {"read_write"}
assert uses("a", "aten::add") == {"read"}
assert "write" in uses("b", "aten::add")
assert uses("a", "aten::layer_norm") == {"read"}
assert uses("a", "aten::mul_") == {"read_write"}
assert uses("a", "aten::index_put") == {"read"}
assert uses("host", "aten::add_") == {"read_write"}
# Each row must name a block that was allocated. Made-up addresses of tensors must have no rows.
blocks = {row["alloc_id"] for row in rows if row["event"] in ("alloc", "host_alloc")}
for row in io:
    assert row["alloc_id"] in blocks or row["alloc_id"] == "0" and row["device"] == "-1", row
print(len(io), "io rows")
