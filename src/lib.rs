//! Strait: an east-west gateway data plane for multicluster service meshes.
//!
//! The control path (`xds`) builds snapshots from discovery. The data path reads them and
//! forwards bytes: `xds → snapshot ← datapath`. ARCHITECTURE.md follows one tunnel through the
//! modules, and lists them in the order of the groups below.
#![forbid(unsafe_code)]

// Command line and composition.
pub mod app;
pub mod cli;

// Configuration.
pub mod config;
pub mod yaml;

// Data path.
pub mod datapath;
pub mod explain;
pub mod limits;
pub mod outer;
pub mod responder;

// State between the two paths.
pub mod snapshot;

// Control path.
pub mod grpc;
pub mod xds;

// Certificates and parsers.
pub mod tls;
pub mod wire;

// Operation.
pub mod admin;
pub mod status;
pub mod telemetry;

// Foundations.
mod labels;
pub mod lifecycle;
mod output;
pub mod reason;
mod replace_file;
pub mod sock_diag;
pub mod watch;

// Developer tools, which the gateway never uses, and its tests do.
#[cfg(feature = "tools")]
pub mod tools;

#[cfg(test)]
mod tests;
