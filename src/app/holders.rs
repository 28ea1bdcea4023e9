//! Holders of descriptors, for the status page.

use std::sync::Arc;

use crate::admin::{Descriptors, Holders};
use crate::datapath::Gateway;

/// Returns the source of the descriptor usage of the running gateway.
pub(super) fn running(gateway: &Arc<Gateway>) -> Holders {
    let gateway = Arc::clone(gateway);
    Holders::new(move |most| {
        let usage = gateway.admission.pool.usage(most);
        let holders = usage.holders.iter();
        Descriptors {
            used: usage.used,
            max: usage.max,
            holders: holders
                .map(|(name, held)| (name.to_string(), *held))
                .collect(),
        }
    })
}
