//! Lines of entries, for findings that need other sections or the mesh.

use std::path::Path;

use derive_more::Display;

use crate::yaml::{Fields, Place};

/// File and line of an entry. All are equal: an entry that has moved has not changed.
#[derive(Clone, Debug, Default, Display)]
pub struct Line(pub Place);

impl Line {
    /// Returns the line of the map that is read.
    pub(super) fn of(fields: &Fields<'_>) -> Self {
        Self(fields.place())
    }

    /// Returns the line without its file.
    pub fn number(&self) -> u64 {
        self.0.line
    }

    /// Returns the file, unless it is `file`.
    pub fn file_beside(&self, file: &Path) -> Option<String> {
        (self.0.file != file).then(|| self.0.file.display().to_string())
    }

    /// Describes the line to readers of `file`: `line 7`, or `FILE:7` for another file.
    pub fn within(&self, file: &Path) -> String {
        if self.0.file == file { format!("line {}", self.0.line) } else { self.to_string() }
    }
}

impl PartialEq for Line {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
