//! What `--log` and `BRAIDFS_LOG` may say: a word that is no level would be a module's name, and log nothing.

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Takes `info`, or levels of modules, as in `warn,braidfs::tx=debug`.
///
/// # Errors
/// A message for the user.
pub fn parse(text: &str) -> Result<String, String> {
    let is_level = |word: &str| {
        LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word)) || matches!(word.as_bytes(), [b'0'..=b'5'])
    };
    // spans and their fields may have anything in them
    let is_span = |word: &str| word.contains(['[', ']', '{', '}']);
    for word in text.split(',').map(str::trim).filter(|w| !w.is_empty()) {
        let (module, level) = word.rsplit_once('=').map_or((word, None), |(module, level)| (module, Some(level)));
        let is_module = module.starts_with("braidfs") || module.contains("::");
        match level {
            _ if is_span(word) => {}
            Some(level) if is_level(level) => {}
            None if is_level(word) || is_module => {}
            _ => {
                return Err(format!(
                    "{}: use error, warn, info, debug, trace or off, or one for a module, as in `warn,braidfs::tx=debug`",
                    level.unwrap_or(word)
                ));
            }
        }
    }
    Ok(text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_one_of_those_that_there_are() {
        for text in
            ["info", "WARN", "off", "", "3", "warn,braidfs::tx=debug", "braidfs_fuse", "[request{op=READ}]=trace"]
        {
            assert_eq!(parse(text).as_deref(), Ok(text));
        }
        for text in ["inf", "foo", "wran", "7", "warn,deb", "braidfs=much", "=", "braidfs="] {
            assert!(parse(text).is_err_and(|why| why.contains("debug")), "{text}");
        }
    }
}
