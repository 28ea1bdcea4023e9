//! Registry of the ClientHellos of tunnels whose endpoint has not answered yet, for loop
//! detection.
//!
//! A ClientHello is forwarded unchanged, so a route that leads back to a gateway brings its
//! random back on another connection. A client generates a new random for each connection (RFC
//! 8446 section 4.1.2). More than [`SAME_RANDOM_MAX`] tunnels with one random are therefore a loop.

use std::collections::HashMap;
use std::sync::LazyLock;

use parking_lot::Mutex;

use crate::reason::Reason;
use crate::telemetry::Record;
use crate::wire::client_random::{ClientRandom, client_random};

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

/// Counts the ClientHello at the start of `bytes`, if there is one.
///
/// # Errors
/// [`Reason::Loop`] if [`SAME_RANDOM_MAX`] tunnels with its random are in flight. The record of the
/// tunnel gets the explanation.
pub fn register(bytes: &[u8], record: &mut Record) -> Result<Option<InFlight>, Reason> {
    let Some(random) = client_random(bytes) else {
        return Ok(None);
    };
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
    Ok(Some(InFlight(random)))
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut randoms = RANDOMS.lock();
        if let Some(count) = randoms.get_mut(&self.0) {
            *count -= 1;
            if *count == 0 {
                randoms.remove(&self.0);
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

    fn hello(number: u8) -> Vec<u8> {
        let mut hello = vec![22, 3, 1, 0, 38, 1, 0, 0, 34, 3, 3];
        hello.extend([number; 32]);
        hello
    }

    #[test]
    fn three_tunnels_with_one_random_are_let_through_and_nothing_is_kept() {
        let peer = Peer::unauthenticated(([192, 0, 2, 1], 1).into(), Arc::default(), None);
        let mut record = Record::new(&Arc::new(Metrics::new()), &peer.source, "echo.app:80");
        let mut register = |bytes: &[u8]| register(bytes, &mut record);
        let mut held: Vec<_> = (0..3).map(|_| register(&hello(1)).unwrap()).collect();
        assert_eq!(register(&hello(1)).unwrap_err(), Reason::Loop);
        assert!(register(&hello(2)).unwrap().is_some(), "another random");
        assert!(register(b"no hello").unwrap().is_none());
        held.pop();
        assert!(register(&hello(1)).is_ok());
        drop(held);
        assert!(!RANDOMS.lock().contains_key(&[1; 32]));
    }
}
