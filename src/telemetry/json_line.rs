//! Format of a log line as JSON.

use std::fmt;
use std::str;

use serde::ser::{SerializeMap, Serializer as _};
use tracing::{Event, Subscriber};
use tracing_serde::SerdeMapVisitor;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Initial capacity in bytes of a line: few lines are longer.
const LINE_BYTES: usize = 768;

/// Format of events as one JSON object a line: timestamp, level, fields, target.
///
/// It writes what the formatter `Json` of `tracing_subscriber` writes without spans. That one
/// passes each piece of each string through [`fmt::Write`] and validates it, which was a sixth of
/// the user instructions of a short tunnel.
#[derive(Debug)]
pub(super) struct JsonLine;

impl<S, N> FormatEvent<S, N> for JsonLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let line = to_json(event).map_err(|_| fmt::Error)?;
        writer.write_str(str::from_utf8(&line).map_err(|_| fmt::Error)?)
    }
}

/// Returns the line of the event, with its end.
fn to_json(event: &Event<'_>) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    let mut timestamp = String::new();
    SystemTime.format_time(&mut Writer::new(&mut timestamp))?;
    let mut line = Vec::with_capacity(LINE_BYTES);
    let mut serializer = serde_json::Serializer::new(&mut line);
    let mut object = serializer.serialize_map(None)?;
    object.serialize_entry("timestamp", &timestamp)?;
    object.serialize_entry("level", event.metadata().level().as_str())?;
    let mut fields = SerdeMapVisitor::new(object);
    event.record(&mut fields);
    let mut object = fields.take_serializer()?;
    object.serialize_entry("target", event.metadata().target())?;
    object.end()?;
    line.push(b'\n');
    Ok(line)
}
