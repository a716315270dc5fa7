//! What a check finds.

use crate::codes;

/// One thing that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Finding {
    /// What, a number of [`codes`].
    pub code: u32,
    /// In which domain.
    pub domain: Option<u16>,
    /// Of which inode or node.
    pub node: Option<u64>,
    /// Its path, where it has one.
    pub path: Option<String>,
    /// What does not hold, in words.
    pub message: String,
    /// Whether it was mended.
    pub fixed: bool,
}

impl Finding {
    /// Whether a repair loses nothing that a user stored ([`codes::is_safe`]).
    pub fn is_safe(&self) -> bool {
        codes::is_safe(self.code)
    }
}
