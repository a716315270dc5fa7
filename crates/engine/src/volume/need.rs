//! What a domain without room needs, and how often it waits for another thread that empties groups.

/// Who waits for another thread so often, for one operation, and finds no room behind it, has other domains empty groups then, or
/// is refused: a drain goes from group to group for hours.
const WAITS: u32 = 4;

/// What a domain lacks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// Blocks: those that were promised may lie on any device.
    Blocks,
    /// Numbers of inodes, which groups on devices that its tenant may not use do not give out.
    Numbers,
}

/// Whether somebody who lacks room for the `attempt`th time waits once more for what another thread empties.
pub(super) fn may_wait(attempt: u32) -> bool {
    attempt < WAITS
}
