"""Edits the metadata of an unmounted braidfs image as an attacker would: every checksum is right afterwards.

Knows of docs/disk-format.md only what it needs: node blocks with inode records, and directory buckets.
"""

import os
import struct

BLOCK = 4096
NODE, BUCKET = 8, 9
RECORD = struct.Struct("<QQQIHBB")
INODE_FIXED = 102
DENTRY = struct.Struct("<QQIBB")
LINKS, XATTRS, INLINE, INLINE_DIR, EXTENTS, TREE1, TREE2, LINK_NODES, XATTR_NODES = range(1, 10)

TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    TABLE.append(byte)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def seal(block):
    struct.pack_into("<I", block, 4, 0)
    struct.pack_into("<I", block, 4, crc32c(block))


def dentries(body):
    """[[hash, node, generation, kind, name]]"""
    out, at = [], 0
    while at < len(body):
        *fixed, length = DENTRY.unpack_from(body, at)
        at += DENTRY.size + length
        out.append([*fixed, bytes(body[at - length : at])])
    return out


def pack_dentries(entries):
    return b"".join(DENTRY.pack(*fixed, len(name)) + name for *fixed, name in entries)


def link(parent, name):
    return struct.pack("<QB", parent, len(name)) + name


def extent(lblk, addr, length):
    return struct.pack("<Q", lblk)[:6] + struct.pack("<Q", addr)[:6] + struct.pack("<I", length)[:3] + b"\0"


class Inode:
    """A record: `fixed` is the part in front of the sections, `sections` {kind: body}."""

    def __init__(self, record):
        self.node, self.owner, self.version, self.generation, _, self.kind, self.flags = RECORD.unpack_from(record)
        payload = record[RECORD.size :]
        self.fixed, self.sections, at = bytearray(payload[:INODE_FIXED]), {}, INODE_FIXED
        while at < len(payload):
            kind, length = struct.unpack_from("<BH", payload, at)
            at += 3 + length
            self.sections[kind] = payload[at - length : at]
        links = self.sections.get(LINKS, b"")
        self.name = links[9 : 9 + links[8]] if links else b""
        self.parent = struct.unpack_from("<Q", links)[0] if links else 0

    def pack(self):
        sections = [struct.pack("<BH", k, len(b)) + b for k, b in sorted(self.sections.items()) if b]
        payload = bytes(self.fixed) + b"".join(sections)
        head = RECORD.pack(self.node, self.owner, self.version, self.generation, len(payload), self.kind, self.flags)
        return head + payload

    def put(self, offset, form, value):
        struct.pack_into(form, self.fixed, offset, value)


def edit(image, on_inode, on_entries):
    """Calls on_inode(Inode) for each inode record that counts, of several versions the newest, and on_entries(entries)
    for each list of entries of a directory; they change them. Returns the inodes as they are then, {name: Inode}.

    What on_inode adds must fit in the block, which may be full: whoever makes the inodes leaves room in each."""
    seen, newest = {}, {}
    with open(image, "r+b", buffering=0) as file:
        blocks = range(0, os.fstat(file.fileno()).st_size, BLOCK)
        for at in blocks:
            block = os.pread(file.fileno(), BLOCK, at)
            if block[:4] == b"BRFS" and block[8] == NODE:
                for inode in filter(None, map(inode_of, records_of(block))):
                    newest[inode.node] = max(newest.get(inode.node, 0), inode.version)
        for at in blocks:
            block = bytearray(os.pread(file.fileno(), BLOCK, at))
            old = bytes(block)
            if block[:4] != b"BRFS":
                continue
            if block[8] == NODE:
                edit_nodes(block, newest, on_inode, on_entries, seen)
            elif block[8] == BUCKET:
                length = struct.unpack_from("<H", block, 46)[0]
                entries = dentries(block[48 : 48 + length])
                on_entries(entries)
                block[48 : 48 + length] = pack_dentries(entries)
            if block != old:
                seal(block)
                os.pwrite(file.fileno(), block, at)
    return seen


def records_of(block):
    count = struct.unpack_from("<H", block, 32)[0]
    ends = struct.unpack_from(f"<{count}H", block, 40)
    body = bytes(block[40 + 2 * count :])
    return [body[start:end] for start, end in zip((0, *ends), ends)]


def inode_of(record):
    return Inode(record) if record[30] == 1 else None


def edit_nodes(block, newest, on_inode, on_entries, seen):
    records = records_of(block)
    for i, record in enumerate(records):
        inode = inode_of(record)
        if inode is None or inode.version < newest[inode.node]:
            continue
        seen[inode.name] = inode
        on_inode(inode)
        if INLINE_DIR in inode.sections:
            entries = dentries(inode.sections[INLINE_DIR])
            on_entries(entries)
            inode.sections[INLINE_DIR] = pack_dentries(entries)
        records[i] = inode.pack()
    body, ends = b"".join(records), [sum(map(len, records[: i + 1])) for i in range(len(records))]
    new = struct.pack(f"<{len(records)}H", *ends) + body
    if len(new) > BLOCK - 40:
        raise ValueError("the changed records do not fit in their block")
    block[40:] = new + bytes(BLOCK - 40 - len(new))
