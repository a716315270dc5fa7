//! Where the results of a measurement go, and from where they come: the same for all subcommands that keep theirs.

use crate::{Result, cli, results};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

/// See the module.
#[derive(Debug, Clone, clap::Args)]
pub struct ResultsArgs {
    /// Where the results go, as JSON, as they come
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print the results as JSON, no tables
    #[arg(long)]
    json: bool,
    /// Measure nothing: the results of this file
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Put the tables into the page of them in DIR, between their marks, and draw the picture that it has
    #[arg(long, value_name = "DIR")]
    docs: Option<PathBuf>,
}

impl ResultsArgs {
    /// Keeps what there is so far, where that is wanted.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn keep<T: Serialize>(&self, so_far: &T) -> Result<()> {
        self.output.as_ref().map_or(Ok(()), |path| results::write(path, so_far))
    }
    /// Those of a file of this schema, or what is measured now: put into the pages of a directory, and shown.
    ///
    /// # Errors
    /// Of the measurement, the file, the pages.
    pub(crate) fn show<T: Serialize + DeserializeOwned>(
        &self,
        (schema, version): (&str, u32),
        measure: impl FnOnce() -> Result<T>,
        put: impl FnOnce(&T, &Path) -> Result<()>,
        terminal: impl FnOnce(&T) -> String,
    ) -> Result<()> {
        let results = match &self.from {
            Some(path) => results::read(path, schema, version)?,
            None => measure()?,
        };
        self.docs.as_ref().map_or(Ok(()), |dir| put(&results, dir))?;
        if self.json { cli::say_json(&results) } else { cli::say(&terminal(&results)) }
    }
}
