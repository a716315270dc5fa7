//! Which cells run, and in which order: repetitions of the targets alternate (A B A B), so that whatever disturbs the
//! machine disturbs all of them.

use crate::suite::{Group, TestId};
use crate::target::Target;
use crate::worker::{Aged, Scale, Sizes};

/// A set of sizes and times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Profile {
    /// Name by which `--profile` chooses it.
    pub name: &'static str,
    /// Measured seconds of a repetition.
    pub seconds: f64,
    /// Seconds before them that do not count.
    pub warm_up: f64,
    /// Repetitions of each cell.
    pub reps: usize,
    /// Is the file system made again for each repetition?
    pub remake: bool,
    /// Is the image written through once before?
    pub fill: bool,
    /// Size of the file systems.
    pub size: u64,
    /// No repetition but the first begins after so many minutes.
    pub minutes: Option<f64>,
    /// Sizes of the set-up.
    pub scale: Scale,
}

/// Does everything work? Under three minutes on two cores.
pub const QUICK: Profile = Profile {
    name: "quick",
    seconds: 0.1,
    warm_up: 0.02,
    reps: 1,
    remake: false,
    fill: false,
    size: 1 << 30,
    minutes: None,
    scale: Scale { files: 1000, entries: 500, blocks: 2048, branch: 4, aged: Aged::SMALL, sizes: Sizes::OWN },
};

/// Figures to talk about, in under twenty minutes.
pub const STANDARD: Profile = Profile {
    name: "standard",
    seconds: 0.25,
    warm_up: 0.05,
    reps: 3,
    remake: true,
    fill: true,
    size: 1 << 30,
    minutes: Some(19.0),
    scale: Scale { files: 5000, entries: 2000, blocks: 8192, branch: 8, aged: Aged::SMALL, sizes: Sizes::OWN },
};

/// Figures to publish: hours.
pub const LONG: Profile = Profile {
    name: "long",
    seconds: 3.0,
    warm_up: 0.5,
    reps: 5,
    remake: true,
    fill: true,
    size: 4 << 30,
    minutes: None,
    scale: Scale { files: 20_000, entries: 8192, blocks: 32_768, branch: 8, aged: Aged::SMALL, sizes: Sizes::OWN },
};

/// One repetition of one cell.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Turn<'a> {
    /// What is run.
    pub test: TestId,
    /// The file system under test.
    pub target: &'a Target,
    /// With how many workers.
    pub cores: usize,
    /// Which repetition, from 0.
    pub rep: usize,
}

/// Numbers of cores up to `cpus`: powers of two, and all.
pub fn sweep(cpus: usize) -> Vec<usize> {
    let mut out: Vec<usize> = (0..).map(|i| 1usize << i).take_while(|n| *n < cpus).collect();
    out.push(cpus.max(1));
    out
}

/// Why a cell cannot run; none where it can.
pub fn unfit(test: &TestId, target: &Target, cores: usize, cpus: usize) -> Option<String> {
    if test.direct && *target == Target::Library {
        return Some("the library has no page cache of the kernel to go around".into());
    }
    if test.test.group == Group::External && *target == Target::Library {
        return Some("a program needs a mounted file system".into());
    }
    if test.background && cores >= cpus && cores > 1 {
        return Some("no CPU is left for the background worker".into());
    }
    None
}

/// All turns. With `remake`, targets alternate, and every cell has its first repetition before any has its second;
/// without, each target has all its turns on one file system.
pub fn turns<'a>(tests: &[TestId], targets: &'a [Target], cores: &[usize], reps: usize, remake: bool) -> Vec<Turn<'a>> {
    let mut out = Vec::new();
    if remake {
        for rep in 0..reps {
            for &test in tests {
                for &cores in cores {
                    out.extend(targets.iter().map(|target| Turn { test, target, cores, rep }));
                }
            }
        }
    } else {
        for target in targets {
            for &test in tests {
                for &cores in cores {
                    out.extend((0..reps).map(|rep| Turn { test, target, cores, rep }));
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_counts() {
        assert_eq!(sweep(1), [1]);
        assert_eq!(sweep(2), [1, 2]);
        assert_eq!(sweep(6), [1, 2, 4, 6]);
        assert_eq!(sweep(8), [1, 2, 4, 8]);
    }

    #[test]
    fn targets_alternate() {
        let tests: Vec<TestId> = crate::suite::choose("DRBL").expect("a test");
        let targets = [Target::Ext4, Target::Tmpfs];
        let order: Vec<String> =
            turns(&tests, &targets, &[1], 2, true).iter().map(|t| format!("{}{}", t.target, t.rep)).collect();
        assert_eq!(order, ["ext40", "tmpfs0", "ext41", "tmpfs1"]);
    }

    #[test]
    fn background_needs_a_cpu() {
        let bg = "DRBL_bg".parse::<TestId>().expect("a test");
        assert!(unfit(&bg, &Target::Ext4, 2, 2).is_some());
        assert!(unfit(&bg, &Target::Ext4, 1, 2).is_none());
        assert!(unfit(&bg, &Target::Ext4, 1, 1).is_none());
    }
}
