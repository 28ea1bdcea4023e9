//! Generated code, in modules nested like the protobuf packages.

pub(crate) mod envoy {
    pub(crate) mod config {
        pub(crate) mod cluster {
            /// CDS.
            pub mod v3 {
                include!("generated/envoy.config.cluster.v3.rs");
            }
        }
        pub(crate) mod core {
            /// Node identification and addresses.
            pub mod v3 {
                include!("generated/envoy.config.core.v3.rs");
            }
        }
        pub(crate) mod endpoint {
            /// EDS.
            pub mod v3 {
                include!("generated/envoy.config.endpoint.v3.rs");
            }
        }
    }
    pub(crate) mod service {
        pub(crate) mod discovery {
            /// Delta ADS.
            pub mod v3 {
                include!("generated/envoy.service.discovery.v3.rs");
            }
        }
    }
    pub(crate) mod r#type {
        /// Numeric types.
        pub mod v3 {
            include!("generated/envoy.r#type.v3.rs");
        }
    }
}

pub(crate) mod google {
    /// Status of an RPC.
    pub mod rpc {
        include!("generated/google.rpc.rs");
    }
}

pub(crate) mod istio {
    /// L4 authorization policies.
    pub mod security {
        include!("generated/istio.security.rs");
    }
    pub(crate) mod v1 {
        /// Certificate issuance.
        pub mod auth {
            include!("generated/istio.v1.auth.rs");
        }
    }
    /// WDS.
    pub mod workload {
        include!("generated/istio.workload.rs");
    }
}
