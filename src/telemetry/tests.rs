//! Helpers of the telemetry tests.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing_subscriber::fmt::MakeWriter;

pub(super) use crate::tools::samples::source;

/// Writer that keeps all written bytes.
#[derive(Clone, Debug, Default)]
pub(super) struct Captured(Arc<Mutex<Vec<u8>>>);

impl Captured {
    /// Returns everything that was written so far.
    pub(super) fn text(&self) -> String {
        let bytes = self.0.lock();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl io::Write for Captured {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Captured {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Returns the value of the only sample of `name` with all of `labels`.
pub(super) fn value(text: &str, name: &str, labels: &[&str]) -> u64 {
    let mut found = text.lines().filter(|line| {
        line.starts_with(&format!("{name}{{")) && labels.iter().all(|label| line.contains(label))
    });
    let line = found.next().expect("a sample with these labels");
    assert!(found.next().is_none(), "more than one sample of {name} with {labels:?}");
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("an integer")
}
