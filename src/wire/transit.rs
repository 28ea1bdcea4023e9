//! Permission of tunnels to leave the network.

use std::fmt;

/// Use of other networks by tunnels that peers open. Of several limits, the smallest applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Transit {
    /// None.
    #[default]
    Off,
    /// Only for tunnels that the endpoints of the own network cannot take. A tunnel that came
    /// through another gateway never leaves.
    Failover,
    /// By the distribution of the service, also for tunnels that came through another gateway.
    Always,
}

impl Transit {
    /// All variants with their names in the configuration.
    pub const NAMES: [(&str, Self); 3] = [
        ("off", Self::Off),
        ("failover", Self::Failover),
        ("always", Self::Always),
    ];
}

impl fmt::Display for Transit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = Self::NAMES.into_iter().find(|(_, of)| of == self);
        f.write_str(word.map_or("", |(word, _)| word))
    }
}
