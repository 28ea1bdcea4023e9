//! Strait: an east-west gateway data plane for multicluster service meshes.
//!
//! Two arms meet in one place, `xds → snapshot ← datapath`: the control path turns what discovery
//! tells into snapshots, the data path reads them and forwards bytes. The modules below stand in
//! the order in which a tunnel meets them; ARCHITECTURE.md follows one tunnel through them.
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
pub mod hbone;

pub mod grpc;
pub mod snapshot;
pub mod xds;

pub mod admin;
pub mod status;
pub mod telemetry;
