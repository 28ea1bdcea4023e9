//! Addresses: each test has its own part of 127.0.0.0/8, so that all can use the well-known ports
//! at the same time.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};

use tokio::net::TcpListener;

/// 127.A.B.0/24, or the addresses of a lab.
#[derive(Clone, Copy, Debug)]
pub struct Net([u8; 3]);

/// A port for endpoints that speak plain TCP.
pub const fn endpoint_port() -> u16 {
    9000
}

impl Net {
    /// Returns a net that no other test of this or another process uses.
    pub fn new() -> Self {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        loop {
            let [_, _, high, low] = std::process::id().to_be_bytes();
            let [round, next] = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
            let second = 1 + (high ^ low).wrapping_add(round) % 250;
            let net = Self([127, second, low.wrapping_add(next)]);
            if std::net::TcpListener::bind((net.ip(1), 15008)).is_ok() {
                return net;
            }
        }
    }

    /// Returns the net of a lab: A.B.C.0/24.
    pub const fn of_lab(first: [u8; 3]) -> Self {
        Self(first)
    }

    pub fn ip(self, last: u8) -> IpAddr {
        let [first, second, third] = self.0;
        Ipv4Addr::new(first, second, third, last).into()
    }

    pub fn address(self, last: u8, port: u16) -> SocketAddr {
        SocketAddr::new(self.ip(last), port)
    }

    /// Listens at host `last`.
    pub async fn listen(self, last: u8, port: u16) -> TcpListener {
        TcpListener::bind(self.address(last, port)).await.expect("a listener")
    }
}
