//! Registry of the ClientHellos of tunnels whose endpoint has not answered yet, for loop
//! detection.
//!
//! A ClientHello is forwarded unchanged, so a route that leads back to a gateway brings its
//! random back on another connection. A client generates a new random for each connection (RFC
//! 8446 section 4.1.2). More than [`SAME_RANDOM_MAX`] tunnels with one random are therefore a loop.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::LazyLock;

use parking_lot::Mutex;

use crate::reason::Reason;
use crate::telemetry::Record;
use crate::wire::client_hello::ClientRandom;

/// Limit of tunnels in flight with the same random: a valid chain may pass one gateway three
/// times.
pub const SAME_RANDOM_MAX: u32 = 3;

/// Number of tunnels in flight by random. An entry takes about 64 bytes and is removed with its
/// last tunnel, so there are no more entries than tunnels. The table is global so that a tunnel
/// carries no reference to it.
static RANDOMS: LazyLock<Mutex<HashMap<ClientRandom, u32>>> = LazyLock::new(Mutex::default);

/// ClientHello in flight, removed on drop.
#[derive(Debug)]
pub struct InFlight(ClientRandom);

/// Counts a ClientHello.
///
/// # Errors
/// [`Reason::Loop`] if [`SAME_RANDOM_MAX`] tunnels with its random are in flight. The record of the
/// tunnel gets the explanation.
pub fn register(random: ClientRandom, record: &mut Record) -> Result<InFlight, Reason> {
    let mut randoms = RANDOMS.lock();
    let count = randoms.entry(random).or_default();
    if *count >= SAME_RANDOM_MAX {
        record.set_detail(format!(
            "{SAME_RANDOM_MAX} tunnels with the random of this ClientHello wait for their \
             endpoints; look for a route that leads back to a gateway"
        ));
        return Err(Reason::Loop);
    }
    *count += 1;
    Ok(InFlight(random))
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Entry::Occupied(mut count) = RANDOMS.lock().entry(self.0) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::datapath::identity::Peer;
    use crate::telemetry::Metrics;

    #[test]
    fn three_tunnels_with_one_random_are_let_through_and_nothing_is_kept() {
        let peer = Peer::unauthenticated(([192, 0, 2, 1], 1).into(), Arc::default(), None);
        let mut record = Record::new(&Arc::new(Metrics::new()), &peer.source, "echo.app:80");
        let mut register = |number| register([number; 32], &mut record);
        let mut held: Vec<_> = (0..3).map(|_| register(1).unwrap()).collect();
        assert_eq!(register(1).unwrap_err(), Reason::Loop);
        assert!(register(2).is_ok(), "another random");
        held.pop();
        assert!(register(1).is_ok());
        drop(held);
        assert!(!RANDOMS.lock().contains_key(&[1; 32]));
    }
}
