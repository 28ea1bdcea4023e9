//! Process log: text or JSON on stderr, with a level that can change at run time.
//!
//! Lines pass through a bounded queue to a dedicated thread, which writes them in batches. A slow
//! disk or terminal loses lines, which are counted; it never delays a tunnel.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal, Write};
use std::panic::{self, PanicHookInfo};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tracing::subscriber::set_global_default;
use tracing::{Subscriber, error};
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::{Registry, reload};

use super::json_line::JsonLine;
use crate::config::{Directives, Log, LogFormat};

/// Maximum number of queued lines. At about 500 bytes each they hold 4 MiB.
const QUEUED_LINES: usize = 8192;

/// Pause after a batch of lines was written. Lines that are queued meanwhile wake nobody, and are
/// the next batch.
const BATCH_PAUSE: Duration = Duration::from_millis(5);
/// Size in bytes above which a batch is written before its end.
const BATCH_BYTES: usize = 64 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("log level {0:?}: {1}")]
    Level(String, String),
    #[error("cannot start log: it is already running")]
    Started,
}

/// Handle to the running log; cheap to clone. Queued lines are written when the last handle is
/// dropped or the log is closed.
#[derive(Clone, derive_more::Debug)]
#[debug("LogHandle({:?})", self.current())]
pub struct LogHandle(Arc<Inner>);

struct Inner {
    reload: reload::Handle<Targets, Registry>,
    configured: Mutex<String>,
    current: Mutex<String>,
    drops: Option<ErrorCounter>,
    guard: Mutex<Option<WorkerGuard>>,
}

/// Starts the process log as configured.
pub fn init(log: &Log) -> Result<LogHandle, LogError> {
    let (writer, guard) = NonBlockingBuilder::default()
        .lossy(true)
        .buffered_lines_limit(QUEUED_LINES)
        .thread_name("strait-log")
        // It ends early where crossbeam has left a token, which costs a write.
        .finish(Batches::new(io::stderr(), || std::thread::park_timeout(BATCH_PAUSE)));
    let colour = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let drops = writer.error_counter();
    let (subscriber, handle) = build(log, writer, colour, Some((drops, guard)))?;
    set_global_default(subscriber).map_err(|_| LogError::Started)?;
    panic::set_hook(Box::new(log_panic));
    Ok(handle)
}

/// Number of panics of the process since the log was started.
static PANICS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of panics since the log was started.
pub fn panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

/// Number of lines that standard error has not taken.
static UNWRITTEN: AtomicU64 = AtomicU64::new(0);

/// Returns the number of lines that were lost because they could not be written.
pub(super) fn unwritten_lines() -> u64 {
    UNWRITTEN.load(Ordering::Relaxed)
}

/// Batches of lines for one writer. Lines that it does not take, as on a full disk, are counted.
struct Batches<W> {
    to: W,
    lines: Vec<u8>,
    /// Pauses after a batch.
    pause: fn(),
}

impl<W: Write> Batches<W> {
    const fn new(to: W, pause: fn()) -> Self {
        Self { to, lines: Vec::new(), pause }
    }

    /// Writes the lines. Those that are not written completely are lost.
    fn write_lines(&mut self) {
        let mut rest = &*self.lines;
        while !rest.is_empty() {
            match self.to.write(rest) {
                Ok(taken @ 1..) => rest = &rest[taken..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => {
                    let lost = rest.iter().filter(|&&byte| byte == b'\n').count();
                    UNWRITTEN.fetch_add(lost as u64, Ordering::Relaxed);
                    break;
                }
            }
        }
        self.lines.clear();
    }
}

impl<W: Write> Write for Batches<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.lines.len() + line.len() > BATCH_BYTES {
            self.write_lines();
        }
        self.lines.extend_from_slice(line);
        Ok(line.len())
    }

    /// Ends a batch, when the queue is empty.
    fn flush(&mut self) -> io::Result<()> {
        if !self.lines.is_empty() {
            self.write_lines();
            (self.pause)();
        }
        Ok(())
    }
}

/// Counts a panic, and logs it as one line: the hook of the standard library writes several, which
/// are no JSON.
fn log_panic(panicked: &PanicHookInfo<'_>) {
    PANICS.fetch_add(1, Ordering::Relaxed);
    let place = panicked.location().map_or_else(String::new, ToString::to_string);
    let payload = panicked.payload();
    let formatted = || payload.downcast_ref::<String>().map(String::as_str);
    let message = payload.downcast_ref::<&str>().copied().or_else(formatted);
    let thread = std::thread::current();
    let backtrace = match Backtrace::capture() {
        trace if trace.status() == BacktraceStatus::Captured => trace.to_string(),
        _ => "set RUST_BACKTRACE=1".to_owned(),
    };
    error!(
        thread = thread.name().unwrap_or_default(),
        place,
        backtrace,
        "panic, a bug in this gateway: {}",
        message.unwrap_or_default()
    );
}

/// Builds a log with any writer, without installing it as the process log.
pub(crate) fn build<W>(
    log: &Log,
    writer: W,
    colour: bool,
    appender: Option<(ErrorCounter, WorkerGuard)>,
) -> Result<(impl Subscriber + Send + Sync + 'static, LogHandle), LogError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let bad = |error| LogError::Level(log.level.clone(), error);
    let level = Directives::parse(&log.level).map_err(bad)?.text;
    let (filter, reload) = reload::Layer::new(filter(&level).map_err(bad)?);
    let lines = tracing_subscriber::fmt::layer().with_writer(writer);
    let lines = match log.format {
        LogFormat::Text => lines.with_ansi(colour).boxed(),
        LogFormat::Json => lines.event_format(JsonLine).boxed(),
    };
    let subscriber = Registry::default().with(filter).with(lines);
    let (drops, guard) = appender.unzip();
    let handle = LogHandle(Arc::new(Inner {
        reload,
        configured: Mutex::new(level.clone()),
        current: Mutex::new(level),
        drops,
        guard: Mutex::new(guard),
    }));
    Ok((subscriber, handle))
}

/// Returns the filter of some directives. The client of Kubernetes logs each page that it cannot
/// read, with the objects of all tenants in it, so it is silent unless a directive names it.
fn filter(directives: &str) -> Result<Targets, String> {
    let silent = if directives.contains("kube_client") { "" } else { ",kube_client=off" };
    format!("{directives}{silent}").parse::<Targets>().map_err(|error| error.to_string())
}

impl LogHandle {
    /// Changes the level: a level, `target=level`, or a comma-separated list of them.
    ///
    /// A level alone replaces the configured directives. Targets without one are added to the
    /// configured directives, since a filter of targets only would silence everything else.
    ///
    /// # Errors
    /// The syntax error, and the valid syntax.
    pub fn set(&self, directives: &str) -> Result<(), String> {
        let Directives { text, has_default } = Directives::parse(directives)?;
        if has_default {
            self.apply(text)
        } else {
            self.apply(format!("{},{text}", self.0.configured.lock()))
        }
    }

    /// Replaces the configured level, which [`LogHandle::reset`] restores.
    ///
    /// # Errors
    /// As [`LogHandle::set`]. The level is then unchanged.
    pub fn configure(&self, level: &str) -> Result<(), String> {
        let level = Directives::parse(level)?.text;
        self.apply(level.clone())?;
        *self.0.configured.lock() = level;
        Ok(())
    }

    /// Restores the configured level.
    pub fn reset(&self) {
        let configured = self.0.configured.lock().clone();
        // The configured directives were already parsed, so this cannot fail.
        let _ = self.apply(configured);
    }

    /// Returns the directives in use.
    pub fn current(&self) -> String {
        self.0.current.lock().clone()
    }

    /// Returns the count of dropped lines, for [`Metrics`](super::Metrics).
    pub fn drops(&self) -> Option<ErrorCounter> {
        self.0.drops.clone()
    }

    /// Writes the queued lines. Later lines are lost, so this is the last call of the process.
    pub fn close(&self) {
        let guard = self.0.guard.lock().take();
        drop(guard);
    }

    fn apply(&self, directives: String) -> Result<(), String> {
        let filter = filter(&directives)?;
        let mut current = self.0.current.lock();
        self.0.reload.reload(filter).map_err(|error| error.to_string())?;
        *current = directives;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Captured;
    use super::*;

    fn log(level: &str, format: LogFormat) -> Log {
        Log { level: level.into(), format, ..Log::default() }
    }

    #[test]
    fn the_level_changes_while_the_log_runs_and_can_be_reset() {
        let lines = Captured::default();
        let (subscriber, handle) =
            build(&log("info", LogFormat::Text), lines.clone(), false, None).expect("a log");
        tracing::subscriber::with_default(subscriber, || {
            tracing::debug!("hidden");
            handle.set("debug").expect("a level");
            tracing::debug!("shown");
            assert_eq!(handle.current(), "debug");
            handle.reset();
            tracing::debug!("hidden");
        });
        assert_eq!(handle.current(), "info");
        assert!(lines.text().contains("shown") && !lines.text().contains("hidden"));
    }

    #[test]
    fn a_target_alone_is_added_to_the_configured_level() {
        let lines = Captured::default();
        let (subscriber, handle) =
            build(&log("warn", LogFormat::Text), lines.clone(), false, None).expect("a log");
        tracing::subscriber::with_default(subscriber, || {
            handle.set("noisy=debug").expect("a directive");
            tracing::warn!("still there");
            tracing::debug!(target: "noisy", "and this");
            tracing::debug!("but not that");
        });
        assert_eq!(handle.current(), "warn,noisy=debug");
        let text = lines.text();
        assert!(text.contains("still there") && text.contains("and this"), "{text}");
        assert!(!text.contains("but not that"), "{text}");
    }

    #[test]
    fn a_reload_replaces_what_reset_goes_back_to() {
        let (_subscriber, handle) =
            build(&log("info", LogFormat::Text), io::sink, false, None).expect("a log");
        handle.configure("debug, h2=warn").expect("a level");
        assert_eq!(handle.current(), "debug,h2=warn");
        handle.set("trace").expect("a level");
        handle.reset();
        assert_eq!(handle.current(), "debug,h2=warn");
        handle.set(" noisy=off").expect("a directive");
        assert_eq!(handle.current(), "debug,h2=warn,noisy=off");
        handle.configure("inof").expect_err("a misspelt level");
        handle.reset();
        assert_eq!(handle.current(), "debug,h2=warn");
    }

    #[test]
    fn a_misspelt_level_is_an_error_that_names_the_levels() {
        let (_subscriber, handle) =
            build(&log("info", LogFormat::Json), io::sink, false, None).expect("a log");
        for wrong in ["", "inof", "info,", "a=b", "=info", "[span]=info", "a b=info"] {
            assert!(handle.set(wrong).is_err(), "{wrong:?}");
        }
        let error = handle.set("inof").expect_err("a misspelt level");
        assert_eq!(
            error,
            "\"inof\" is not a level; write one of off, error, warn, info, debug, trace"
        );
        assert_eq!(handle.current(), "info");
    }

    #[test]
    fn a_configured_level_that_cannot_be_parsed_is_an_error() {
        let result = build(&log("a=b=c", LogFormat::Text), io::sink, false, None);
        assert!(matches!(result.map(|_| ()), Err(LogError::Level(..))));
    }

    /// Takes a number of bytes, and then nothing.
    struct Disk {
        free: usize,
        writes: Vec<Vec<u8>>,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.free);
            if taken == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.free -= taken;
            self.writes.push(bytes[..taken].to_vec());
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn queued_lines_are_one_write_and_each_line_that_is_not_taken_counts() {
        static PAUSES: AtomicU64 = AtomicU64::new(0);
        let pauses = || PAUSES.load(Ordering::Relaxed);
        let disk = Disk { free: BATCH_BYTES + 20, writes: Vec::new() };
        let mut batches = Batches::new(disk, || _ = PAUSES.fetch_add(1, Ordering::Relaxed));
        for line in [&b"first\n"[..], b"second\n"] {
            batches.write_all(line).expect("a line");
        }
        assert!(batches.to.writes.is_empty(), "the queue is not empty");
        batches.flush().expect("a batch");
        assert_eq!(batches.to.writes, [b"first\nsecond\n"]);
        assert_eq!(pauses(), 1);
        batches.flush().expect("no batch");
        assert_eq!(pauses(), 1, "it pauses without lines");

        let half = [vec![b'-'; BATCH_BYTES / 2 - 1], vec![b'\n']].concat();
        for _ in 0..2 {
            batches.write_all(&half).expect("a line");
        }
        batches.write_all(b"part of this one\n").expect("a line");
        assert_eq!(batches.to.writes.len(), 2, "a full batch is written");
        batches.write_all(b"lost\n").expect("a line");
        let lost = unwritten_lines();
        batches.flush().expect("a batch");
        assert_eq!(batches.to.writes[2], b"part of");
        assert_eq!(unwritten_lines() - lost, 2);
    }

    #[test]
    fn control_characters_cannot_forge_a_line_in_either_format() {
        for format in [LogFormat::Text, LogFormat::Json] {
            let lines = Captured::default();
            let (subscriber, _handle) =
                build(&log("info", format), lines.clone(), false, None).expect("a log");
            tracing::subscriber::with_default(subscriber, || {
                tracing::info!(peer = "a\nb\u{1b}[31m", "line");
            });
            let text = lines.text();
            assert_eq!(text.lines().count(), 1, "{text}");
            assert!(!text.contains('\u{1b}'), "{text}");
        }
    }
}
