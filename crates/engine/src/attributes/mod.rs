//! Attributes of inodes: owner, permissions, size and times; extended attributes; access control lists.

pub mod acl;
mod atime;
pub mod set;
pub mod xattr;
