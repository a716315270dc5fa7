//! Numbers of the findings. A number keeps its meaning for good: programs and documents refer to it.
//!
//! | numbers | part |
//! |---|---|
//! | 1xx | the volume's tables: superblocks, block group allocation table (BAT), domain headers, journals |
//! | 2xx | tables of a group: header, segment table, owner tables, node table |
//! | 3xx | nodes: node blocks, records, inodes, overflow nodes |
//! | 4xx | extents and blocks of files |
//! | 5xx | directories |
//! | 6xx | links between directories and inodes |
//! | 7xx | space: bitmaps, owners, live counts |
//!
//! [`is_safe`] says of which a repair loses nothing that a user stored.

/// A superblock or its replica does not hold or differs from the others.
pub const SUPER_COPY: u32 = 101;
/// One copy of a BAT pair does not hold.
pub const BAT_COPY: u32 = 110;
/// Neither copy of a BAT pair holds; it is made again from the group headers.
pub const BAT_LOST: u32 = 111;
/// One copy of a domain header does not hold.
pub const DOMAIN_COPY: u32 = 120;
/// Neither copy of a domain header holds; it is made again from the journal area.
pub const DOMAIN_LOST: u32 = 121;
/// A domain's journal lies outside its groups.
pub const JOURNAL_PLACE: u32 = 122;
/// A domain had stopped after an error, or a repair of it did not end.
pub const DOMAIN_FAILED: u32 = 123;
/// A journal could not be replayed.
pub const REPLAY_FAILED: u32 = 125;
/// The newest changes of an inode stood in the journal, and were given up with it.
pub const CHANGES_LOST: u32 = 126;
/// The newest domain header was lost: an older one says less than the journal.
pub const DOMAIN_OLD: u32 = 127;
/// What a domain header says of a tenant does not hold.
pub const TENANT: u32 = 128;
/// Two tenants have one name.
pub const TENANT_NAME: u32 = 129;
/// A domain owns no group.
pub const DOMAIN_EMPTY: u32 = 130;

/// One copy of a group header does not hold.
pub const GROUP_COPY: u32 = 201;
/// Neither copy of a group header holds.
pub const GROUP_LOST: u32 = 202;
/// A group header disagrees with the BAT.
pub const GROUP_CLAIM: u32 = 203;
/// One copy of a segment table does not hold.
pub const SEGMENTS_COPY: u32 = 210;
/// Neither copy of a segment table holds.
pub const SEGMENTS_LOST: u32 = 211;
/// A segment table is older than the domain header says: the device lost its newest copy.
pub const SEGMENTS_OLD: u32 = 213;
/// One copy of an owner table does not hold.
pub const OWNERS_COPY: u32 = 220;
/// Neither copy of an owner table holds.
pub const OWNERS_LOST: u32 = 221;
/// An owner table is older than the segment table says: the device lost its newest copy.
pub const OWNERS_OLD: u32 = 223;
/// One copy of a node table block does not hold.
pub const NODES_COPY: u32 = 230;
/// Neither copy of a node table block holds; it is made again from the node blocks.
pub const NODES_LOST: u32 = 231;
/// A node table entry is older than a record of its node in a node block in use: the newest copy of the table was lost.
pub const ENTRY_OLD: u32 = 232;
/// A node table block is older than the segment table says: the device lost its newest copy.
pub const NODES_OLD: u32 = 233;
/// The device could not read a metadata block.
pub const UNREADABLE: u32 = 240;

/// A node table entry points outside its domain's data blocks.
pub const ENTRY_PLACE: u32 = 301;
/// A node block does not hold.
pub const NODE_BLOCK: u32 = 302;
/// A node block lacks the record that the node table names.
pub const RECORD: u32 = 303;
/// An inode record does not hold.
pub const INODE: u32 = 304;
/// Flags of a node table entry disagree with the record.
pub const ENTRY_FLAGS: u32 = 305;
/// An overflow node of an inode is missing or is not what it should be.
pub const OVERFLOW_MISSING: u32 = 306;
/// An overflow node that no inode refers to.
pub const OVERFLOW_UNUSED: u32 = 307;
/// An overflow node that is referred to twice.
pub const OVERFLOW_SHARED: u32 = 308;
/// A node block is older than the node table says: the device lost its newest write.
pub const NODE_BLOCK_OLD: u32 = 309;
/// Links in overflow nodes do not hold.
pub const LINKS_CONTENT: u32 = 310;
/// Extended attributes in overflow nodes do not hold.
pub const XATTRS_CONTENT: u32 = 311;
/// Size or kind of content does not fit the type of the file.
pub const CONTENT: u32 = 312;
/// The root directory is missing.
pub const ROOT: u32 = 313;
/// Limits of users and directories, or those of groups, in the root directory, do not hold.
pub const QUOTA: u32 = 314;

/// An extent lies outside its domain's data blocks.
pub const EXTENT_PLACE: u32 = 401;
/// A block is used twice.
pub const BLOCK_SHARED: u32 = 402;
/// Extents or extent leaves overlap or lie outside their leaf's range.
pub const EXTENT_ORDER: u32 = 403;
/// The inode's count of blocks is wrong.
pub const BLOCK_COUNT: u32 = 404;
/// Checksums where there must be none, or too few.
pub const EXTENT_SUMS: u32 = 405;

/// An inode found again names blocks that were given to others since: it gets holes there.
pub const EXTENT_OLD: u32 = 406;

/// A data block is not what was written (found by a scrub; a check does not read data).
pub const DATA_SUM: u32 = 410;

/// A directory bucket does not hold.
pub const BUCKET: u32 = 501;
/// An entry stands in the wrong bucket.
pub const BUCKET_RANGE: u32 = 502;
/// An entry's position does not follow from its name.
pub const ENTRY_HASH: u32 = 503;
/// A name stands twice in a directory.
pub const NAME_TWICE: u32 = 504;
/// Entries in an inode record do not hold.
pub const INLINE_ENTRIES: u32 = 505;

/// An entry names an inode that does not exist.
pub const ENTRY_DEAD: u32 = 601;
/// An entry names an older generation of an inode.
pub const ENTRY_GENERATION: u32 = 602;
/// An entry tells a wrong file type.
pub const ENTRY_KIND: u32 = 603;
/// An entry names an inode that does not have this link; or who took an inode's last link from it never came to be.
pub const ENTRY_STALE: u32 = 604;
/// A link names a parent that is no directory.
pub const LINK_PARENT: u32 = 611;
/// A link has no entry in its directory.
pub const LINK_NO_ENTRY: u32 = 612;
/// A link's name is taken by another inode.
pub const LINK_TAKEN: u32 = 613;
/// An inode has the same link twice.
pub const LINK_TWICE: u32 = 614;
/// A directory has more than one link, or the root has one.
pub const DIR_LINKS: u32 = 615;
/// The link count is wrong.
pub const LINK_COUNT: u32 = 616;
/// An inode without links that was not reclaimed.
pub const ORPHAN: u32 = 620;
/// An inode that counts links and has none: goes to `/lost+found`.
pub const UNLINKED: u32 = 621;
/// A directory that cannot be reached from the root: goes to `/lost+found`.
pub const UNREACHABLE: u32 = 622;
/// The `REMOTE` flag of a node table entry is wrong.
pub const REMOTE_FLAG: u32 = 630;
/// A record found while a lost node table was made again, named by no directory: dropped.
pub const RECOVERED_UNNAMED: u32 = 633;

/// Blocks marked valid that nothing uses.
pub const LEAKED: u32 = 701;
/// Blocks in use that are not marked valid.
pub const NOT_MARKED: u32 = 702;
/// The live count of a node block is wrong.
pub const LIVE_COUNT: u32 = 703;
/// A segment's kind does not fit its content.
pub const SEGMENT_KIND: u32 = 704;
/// The owner table names another owner of a block.
pub const OWNER: u32 = 705;

/// Whether a finding is about a journal that is given up, whole or in part, or about the header that is lost with it:
/// where the repair is cut off, no later check may find it again.
pub const fn goes_with_journal(code: u32) -> bool {
    matches!(code, DOMAIN_LOST | JOURNAL_PLACE | REPLAY_FAILED | CHANGES_LOST | DOMAIN_OLD)
}

/// Whether a repair of this finding loses nothing that a user stored: it writes a count, a copy, or what follows from something
/// else that holds. Of all others it may give up files, names, content, settings or what a journal holds, or takes what is older
/// than what was lost: somebody must decide that.
pub const fn is_safe(code: u32) -> bool {
    matches!(
        code,
        SUPER_COPY
            | BAT_COPY
            // what the other copy lacks stands in the journal: DOMAIN_OLD where that is gone, too
            | DOMAIN_COPY
            | DOMAIN_FAILED
            // what a group's header says, the BAT says
            | GROUP_COPY
            | GROUP_LOST
            // counted again from the nodes; not SEGMENTS_OLD, without which nobody knows whether the node tables are the newest
            | SEGMENTS_COPY
            | SEGMENTS_LOST
            | OWNERS_COPY
            | OWNERS_LOST
            | OWNERS_OLD
            // what the other copy lacks is ENTRY_OLD or RECOVERED_UNNAMED
            | NODES_COPY
            | ENTRY_FLAGS
            | BLOCK_COUNT
            // an entry follows from the link in its inode; a link that is lost, too, is UNLINKED or ENTRY_STALE
            | BUCKET
            | BUCKET_RANGE
            | ENTRY_HASH
            | INLINE_ENTRIES
            | ENTRY_KIND
            | LINK_NO_ENTRY
            | LINK_TWICE
            | LINK_COUNT
            // somebody deleted it
            | ORPHAN
            | REMOTE_FLAG
            | LEAKED
            | NOT_MARKED
            | LIVE_COUNT
            | SEGMENT_KIND
            | OWNER
    )
}
