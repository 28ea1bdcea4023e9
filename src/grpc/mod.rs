//! The messages and services of the control plane, as far as we use them.
//!
//! `proto/` has them in our own words, with the packages, names and numbers that are on the wire;
//! what is unknown there is skipped by decoders. `generated/` is made of it by `make protos`, and
//! `tests/proto` fails where the two differ. Servers are there for the tests' control plane.

pub mod call;
pub mod channel;
pub mod goaway;
#[expect(
    unused_qualifications,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    clippy::large_enum_variant,
    clippy::too_many_lines,
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
