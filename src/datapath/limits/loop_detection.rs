//! Registry of the ClientHellos of tunnels whose endpoint has not answered yet, for loop
//! detection.
//!
//! A ClientHello is forwarded unchanged, so a route that leads back to a gateway brings its
//! random back on another connection. A client generates a new random for each connection (RFC
//! 8446 section 4.1.2). More than [`SAME_RANDOM_MAX`] tunnels with one random are therefore a loop.

use std::collections::HashMap;
use std::sync::LazyLock;

use parking_lot::Mutex;
use thiserror::Error;

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

/// ClientHello with too many tunnels in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{SAME_RANDOM_MAX} tunnels with the random of this ClientHello wait for their endpoints; look \
     for a route that leads back to a gateway"
)]
pub struct ForwardingLoop;

/// Counts the ClientHello at the start of `bytes`, if there is one.
///
/// # Errors
/// [`SAME_RANDOM_MAX`] tunnels with its random are in flight.
pub fn register(bytes: &[u8]) -> Result<Option<InFlight>, ForwardingLoop> {
    let Some(random) = client_random(bytes) else {
        return Ok(None);
    };
    let mut randoms = RANDOMS.lock();
    let count = randoms.entry(random).or_default();
    if *count >= SAME_RANDOM_MAX {
        return Err(ForwardingLoop);
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

impl ForwardingLoop {
    /// Adds the explanation to the tunnel's record, and returns the reason.
    pub fn record(self, record: &mut Record) -> Reason {
        record.set_detail(self.to_string());
        Reason::Loop
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(number: u8) -> Vec<u8> {
        let mut hello = vec![22, 3, 1, 0, 38, 1, 0, 0, 34, 3, 3];
        hello.extend([number; 32]);
        hello
    }

    #[test]
    fn three_tunnels_with_one_random_are_let_through_and_nothing_is_kept() {
        let mut held: Vec<_> = (0..3).map(|_| register(&hello(1)).unwrap()).collect();
        assert_eq!(register(&hello(1)).unwrap_err(), ForwardingLoop);
        assert!(register(&hello(2)).unwrap().is_some(), "another random");
        assert!(register(b"no hello").unwrap().is_none());
        held.pop();
        assert!(register(&hello(1)).is_ok());
        drop(held);
        assert!(!RANDOMS.lock().contains_key(&[1; 32]));
    }
}
