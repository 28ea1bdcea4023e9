//! The ClientHellos of tunnels whose endpoint has not answered yet, by which loops are found.
//!
//! A hello is passed on as it came, so a route that leads back to a gateway brings the same random
//! back on another connection. A client draws a new random for each connection (RFC 8446 section
//! 4.1.2), so more than a few tunnels with one random are a loop.

use std::collections::HashMap;
use std::fmt;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::reason::Reason;
use crate::telemetry::Record;
use crate::wire::hello::{Random, random};

/// Tunnels in flight with the same random: a chain may rightly pass one gateway three times.
pub const SAME_MAX: u32 = 3;

/// The randoms in flight, each with its number of tunnels. An entry takes about 64 bytes, and goes
/// with its last tunnel: there are no more entries than tunnels. One for the process, so that a
/// tunnel does not carry a reference to it.
static RANDOMS: LazyLock<Mutex<HashMap<Random, u32>>> = LazyLock::new(Mutex::default);

/// A hello in flight, given back on drop.
#[derive(Debug)]
pub struct InFlight(Random);

/// A hello that is in flight too often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop;

/// Counts the hello that `bytes` begin with, if they begin with one.
///
/// # Errors
/// [`SAME_MAX`] tunnels with its random are in flight.
pub fn enter(bytes: &[u8]) -> Result<Option<InFlight>, Loop> {
    let Some(random) = random(bytes) else {
        return Ok(None);
    };
    let mut randoms = randoms();
    let count = randoms.entry(random).or_default();
    if *count >= SAME_MAX {
        return Err(Loop);
    }
    *count += 1;
    Ok(Some(InFlight(random)))
}

/// Each critical section is one step, so what is behind a poisoned lock is whole.
fn randoms() -> MutexGuard<'static, HashMap<Random, u32>> {
    RANDOMS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut randoms = randoms();
        if let Some(count) = randoms.get_mut(&self.0) {
            *count -= 1;
            if *count == 0 {
                randoms.remove(&self.0);
            }
        }
    }
}

impl Loop {
    /// Explains the end of the tunnel in its record, and returns the reason.
    pub fn told(self, record: &mut Record) -> Reason {
        record.detail(self.to_string());
        Reason::Loop
    }
}

impl fmt::Display for Loop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{SAME_MAX} tunnels with the random of this ClientHello wait for their endpoints; \
             look for a route that leads back to a gateway"
        )
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
        let mut held: Vec<_> = (0..3).map(|_| enter(&hello(1)).unwrap()).collect();
        assert_eq!(enter(&hello(1)).unwrap_err(), Loop);
        assert!(enter(&hello(2)).unwrap().is_some(), "another random");
        assert!(enter(b"no hello").unwrap().is_none());
        held.pop();
        assert!(enter(&hello(1)).is_ok());
        drop(held);
        assert!(!randoms().contains_key(&[1; 32]));
    }
}
