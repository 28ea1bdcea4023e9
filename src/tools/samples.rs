//! Sample values of tests and benches, which are several crates.

use crate::telemetry::Source;

/// Returns a peer of cluster west.
pub fn source() -> Source {
    Source {
        address: ([192, 0, 2, 7], 40001).into(),
        listener: "cross-network".into(),
        principal: "spiffe://west.local/ns/shop/sa/checkout".into(),
        trust_domain: "west.local".into(),
        namespace: "shop".into(),
        service_account: "checkout".into(),
        cluster: "west".into(),
        counted_cluster: "west".into(),
    }
}
