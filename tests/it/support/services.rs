//! Generated clients and servers of the control plane's services.

/// Delta ADS.
pub mod discovery {
    include!("generated/envoy.service.discovery.v3.rs");
}

/// Certificate issuance.
pub mod auth {
    include!("generated/istio.v1.auth.rs");
}
