//! Metrics, access log, and the record of each tunnel, which updates both when it is dropped.

mod access;
mod budgets;
mod collected;
mod exposition;
mod json_line;
mod labels;
pub mod logging;
mod metrics;
mod process;
mod record;
mod refusals;
mod sets;
mod spans;
mod tcp;
mod times;
mod xds;

pub use collected::Collected;
pub use labels::{Destination, DestinationService, RemoteNetwork, Source};
pub use logging::LogHandle;
pub use metrics::{AcceptError, ConnectionGuard, Metrics, PolicyOutcome};
pub use record::{Record, connection_refused, report_refused_handshake};
pub use refusals::{Refusals, Refused};
pub use sets::OLD_NAMES;
pub use spans::{Sampling, Tracer};
pub use times::{Handshake, Proximity, Times};
pub use xds::XdsMetrics;

pub use crate::status::{ReloadSource, WorkloadLabels};

#[cfg(test)]
mod tests;
