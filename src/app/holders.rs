//! Holders of descriptors, for the status page.

use std::sync::Arc;

use crate::admin::{DescriptorUsage, DescriptorUsageSource};
use crate::datapath::DataPath;

/// Returns the source of the descriptor usage of the running gateway.
pub(super) fn for_gateway(gateway: &Arc<DataPath>) -> DescriptorUsageSource {
    let gateway = Arc::clone(gateway);
    DescriptorUsageSource::new(move |most| {
        let usage = gateway.admission.pool.usage(most);
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
