//! Messages, services and connections of the control plane's gRPC APIs.
//!
//! `proto/` declares the subset that the gateway uses, with the packages, names and numbers of
//! the wire format. Decoders skip unknown fields. `make protos` generates `generated/` from it,
//! and `tests/proto` fails if the two differ. Services are generated for the tests only.

pub mod call;
pub mod channel;
pub mod goaway;
#[expect(
    clippy::large_enum_variant,
    reason = "the generators write code for any place and any message"
)]
mod messages;

pub use messages::envoy::config::cluster::v3 as cluster;
pub use messages::envoy::config::core::v3 as core;
pub use messages::envoy::config::endpoint::v3 as endpoint;
pub use messages::envoy::service::discovery::v3 as discovery;
pub use messages::envoy::r#type::v3 as number;
pub use messages::google::rpc;
pub use messages::istio::security;
pub use messages::istio::v1::auth;
pub use messages::istio::workload;
