//! Strait: an east-west gateway data plane for multicluster service meshes.
//!
//! The control path (`xds`) builds snapshots from discovery. The data path reads them and
//! forwards bytes: `xds → snapshot ← datapath`. ARCHITECTURE.md follows one tunnel through the
//! modules.
#![forbid(unsafe_code)]

pub mod cli;

pub mod app;
pub mod config;
pub mod lifecycle;
pub mod reason;
pub mod watch;
pub mod yaml;

pub mod tls;
pub mod wire;

pub mod datapath;
pub mod explain;
pub mod hbone;

pub mod grpc;
pub mod snapshot;
pub mod xds;

pub mod admin;
pub mod status;
pub mod telemetry;
