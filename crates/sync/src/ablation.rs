//! Switches for experiments: each puts in the place of what threads do apart what they would else do together, so that what
//! it is worth can be measured (the ablations of Max, USENIX ATC 2021, Figures 8 and 12, and of Son et al., USENIX FAST 2018,
//! section 3.1). Every combination is correct, and slower.
//!
//! They are read once, from the environment variable [`VARIABLE`] (`gate,slots`) or by [`set`], before any lock is made:
//! what a switch changes is decided where an object is made or on a path that is seldom taken. Where all are off, a look-up in
//! the table of cells and a way through a gate have a test more, of a word in a line that they read anyway.

use std::sync::OnceLock;

/// Names of switches, separated by commas; `all`.
pub const VARIABLE: &str = "BRAIDFS_ABLATION";

/// Something that threads do together when it is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Switch {
    /// The gate, [`crate::PassLock`], is an ordinary lock for readers and writers: all readers count in one word.
    Gate = 1,
    /// All threads have the same slot: one list of a transaction, one reservation, one counter, one list of free frames.
    Slots = 2,
    /// [`crate::BiasedRwLock`] is never biased: whoever reads a cell, a directory's among them, counts in its lock, and
    /// whoever changes names of a directory has it alone.
    Cells = 4,
    /// A look-up takes an `Arc` under the lock of its shard, where it else publishes what it looks at, and an open file is
    /// counted in its cell, where it else is a pin of its thread.
    Arcs = 8,
    /// A commit is done by one thread; who waits for it only waits.
    Leader = 16,
}

impl Switch {
    /// All of them, with their names.
    pub const ALL: [(Self, &'static str); 5] = [
        (Self::Gate, "gate"),
        (Self::Slots, "slots"),
        (Self::Cells, "cells"),
        (Self::Arcs, "arcs"),
        (Self::Leader, "leader"),
    ];
}

/// Which switches are on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Switches(u8);

impl Switches {
    /// Of names, separated by commas; `all`, or nothing.
    ///
    /// # Errors
    /// A name that there is not.
    pub fn named(names: &str) -> Result<Self, Unknown> {
        let mut on = 0;
        for name in names.split(',').map(str::trim).filter(|n| !n.is_empty()) {
            on |= match Switch::ALL.iter().find(|s| s.1 == name) {
                Some((switch, _)) => *switch as u8,
                None if name == "all" => Switch::ALL.iter().fold(0, |all, s| all | s.0 as u8),
                None => return Err(Unknown(name.to_owned())),
            };
        }
        Ok(Self(on))
    }
    /// Is this one on?
    pub const fn has(self, switch: Switch) -> bool {
        self.0 & switch as u8 != 0
    }
    /// Are all off?
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// A name that no switch has.
#[derive(Debug, PartialEq, Eq)]
pub struct Unknown(String);

impl std::fmt::Display for Unknown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = Switch::ALL.iter().map(|s| s.1).collect();
        write!(f, "{VARIABLE} has no switch `{}`: {}, all", self.0, names.join(", "))
    }
}

impl std::error::Error for Unknown {}

static ON: OnceLock<Switches> = OnceLock::new();

/// Turns switches on for the life of the process; false where it is too late, since somebody has looked.
pub fn set(switches: Switches) -> bool {
    ON.set(switches).is_ok()
}

/// Those that are on. Names in the environment that are none turn nothing on: [`check`] tells.
pub fn on() -> Switches {
    *ON.get_or_init(|| of_environment().unwrap_or_default())
}

/// Whether this one is on.
pub fn is_on(switch: Switch) -> bool {
    on().has(switch)
}

fn of_environment() -> Result<Switches, Unknown> {
    match std::env::var(VARIABLE) {
        Ok(names) => Switches::named(&names),
        Err(_) => Ok(Switches::default()),
    }
}

/// Those that are on.
///
/// # Errors
/// The environment has a name that there is not.
pub fn check() -> Result<Switches, Unknown> {
    of_environment().map(|_| on())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_have_names() {
        let on = Switches::named("gate, arcs").unwrap();
        assert!(on.has(Switch::Gate) && on.has(Switch::Arcs) && !on.has(Switch::Slots) && !on.has(Switch::Cells));
        assert!(Switches::named("").unwrap().is_empty());
        let all = Switches::named("all").unwrap();
        assert!(Switch::ALL.iter().all(|s| all.has(s.0)));
        assert!(
            Switches::named("gate,door")
                .unwrap_err()
                .to_string()
                .contains("`door`: gate, slots, cells, arcs, leader, all")
        );
    }
}
