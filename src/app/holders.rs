//! Holders of descriptors, for the status page.

use std::sync::Arc;

use crate::admin::{DescriptorUsage, HOLDERS_SHOWN, Source};
use crate::datapath::DataPath;

/// Returns the source of the descriptor usage of the running gateway.
pub(super) fn for_gateway(gateway: &Arc<DataPath>) -> Source<DescriptorUsage> {
    let gateway = Arc::clone(gateway);
    Arc::new(move || {
        let usage = gateway.admission.pool.usage(HOLDERS_SHOWN);
        let holders = usage.holders.iter();
        DescriptorUsage {
            used: usage.used,
            max: usage.max,
            holders: holders
                .map(|(name, held)| (name.to_string(), *held))
                .collect(),
        }
    })
}
