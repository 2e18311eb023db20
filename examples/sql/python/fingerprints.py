"""Computes the fingerprints in docs/use/fingerprints.json by itself: python3 fingerprints.py < fingerprints.json

It shows how a client can tell whether two payloads are the same work. It prints those that differ, and fails.
"""
import hashlib
import json
import sys
from decimal import Decimal


class Number(str):
    pass


def quoted(text):
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " else f"\\u{ord(c):04x}" for c in text) + '"'


def canonical(value, fields=None):
    if isinstance(value, dict):
        members = {quoted(k): canonical(v) for k, v in value.items() if fields is None or k in fields}
        return "{" + ",".join(f"{k}:{members[k]}" for k in sorted(members, key=str.encode)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, Number):
        sign, digits, power = Decimal(value).as_tuple()
        short = "".join(map(str, digits)).rstrip("0")
        power += len(digits) - len(short)
        return ("-" if sign else "") + short.lstrip("0") + (f"e{power}" if power else "") if short else "0"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def fingerprint(v):
    kind = "" if v.get("scope", v["kind"]) == v["kind"] else v["kind"]
    if v.get("ignore_payload"):
        return "0100" + kind.encode().hex()
    if "bytes" in v:
        content = b"b" + bytes.fromhex(v["bytes"])
    else:
        content = b"j" + canonical(json.loads(v["payload"], parse_int=Number, parse_float=Number), v.get("fields")).encode()
    return "0110" + hashlib.sha256(content).digest()[:16].hex() + kind.encode().hex()


differ = [v["about"] for v in json.load(sys.stdin) if fingerprint(v) != v["fingerprint"]]
print(*differ, sep="\n")
sys.exit(len(differ) > 0)
