//! Permission of tunnels to leave the network.

use crate::labels::labelled;

labelled! {
    /// Use of other networks by tunnels that peers open. Of several limits, the smallest applies.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
    pub enum Transit {
        /// None.
        #[default]
        Off = "off",
        /// Only for tunnels that the endpoints of the own network cannot take. A tunnel that came
        /// through another gateway never leaves.
        Failover = "failover",
        /// By the distribution of the service, also for tunnels that came through another gateway.
        Always = "always",
    }
}
