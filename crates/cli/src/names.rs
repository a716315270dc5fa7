//! Names of users and groups, by number and the other way round: as getent(1) and id(1) tell them, who know more than the files
//! in /etc.

use crate::failure::Failure;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// No program is started any more.
static NOBODY_IS_ASKED: AtomicBool = AtomicBool::new(false);

/// From now on numbers have no names, and names no numbers: this process is about to become another user, whose the programs
/// that know them would be.
pub fn ask_nobody() {
    NOBODY_IS_ASKED.store(true, Ordering::Relaxed);
}

/// The number of a user.
///
/// # Errors
/// There is none of the name.
pub fn number_of_user(user: &str) -> Result<u32, Failure> {
    number(&["id", "-u"], 0, "user", user)
}

/// The number of a group.
///
/// # Errors
/// There is none of the name.
pub fn number_of_group(group: &str) -> Result<u32, Failure> {
    number(&["getent", "group"], 2, "group", group)
}

/// The name of a user, where the number has one.
pub fn user(number: u32) -> Option<String> {
    told(&["getent", "passwd"], 0, &number.to_string())
}

/// The name of a group, where the number has one.
pub fn group(number: u32) -> Option<String> {
    told(&["getent", "group"], 0, &number.to_string())
}

fn number(program: &[&str], field: usize, kind: &str, name: &str) -> Result<u32, Failure> {
    if let Ok(n) = name.parse() {
        return Ok(n);
    }
    let number = told(program, field, name).and_then(|n| n.parse().ok());
    number.ok_or_else(|| Failure::at("quota", name, format!("there is no such {kind}")))
}

/// A field of what a program says of somebody; `None` where it knows nobody of the name.
fn told(program: &[&str], field: usize, who: &str) -> Option<String> {
    if NOBODY_IS_ASKED.load(Ordering::Relaxed) {
        return None;
    }
    let asked = Command::new(program[0]).args(&program[1..]).args(["--", who]).output();
    let told = asked.ok().filter(|o| o.status.success()).and_then(|o| String::from_utf8(o.stdout).ok());
    told.and_then(|t| t.lines().next()?.split(':').nth(field).map(|f| f.trim().to_owned())).filter(|f| !f.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_have_names_and_numbers() {
        assert_eq!(number_of_user("4711").ok(), Some(4711));
        assert_eq!(number_of_user("root").ok(), Some(0));
        assert_eq!(number_of_group("4711").ok(), Some(4711));
        assert_eq!(number_of_group("root").ok(), Some(0));
        assert!(number_of_group("no such group").is_err() && number_of_group("").is_err());
        assert!(number_of_user("no such user").is_err() && number_of_user("-1").is_err());
        assert!(number_of_user("").is_err());
        assert_eq!((user(0), group(0)), (Some("root".into()), Some("root".into())));
        assert_eq!((user(4_000_000_001), group(4_000_000_001)), (None, None));
    }
}
