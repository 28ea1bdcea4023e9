//! DNS server that gives the same answer for every name.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::UdpSocket;
use tokio::task::JoinSet;

/// Answer of the server.
#[derive(Clone, Debug)]
pub enum Answer {
    /// These addresses, with a TTL in seconds.
    Addresses(Vec<IpAddr>, u32),
    /// A response code (RFC 1035 section 4.1.1).
    Code(u8),
    /// Nothing.
    Nothing,
}

/// SERVFAIL and NXDOMAIN.
pub const SERVFAIL: Answer = Answer::Code(2);
pub const NXDOMAIN: Answer = Answer::Code(3);

/// Running server; ends on drop.
pub struct DnsServer {
    says: Arc<Mutex<(Answer, usize)>>,
    _task: JoinSet<()>,
}

impl DnsServer {
    /// Serves at an address.
    pub async fn start(at: SocketAddr, says: Answer) -> Self {
        let socket = UdpSocket::bind(at).await.expect("a socket");
        let says = Arc::new(Mutex::new((says, 0)));
        let mut task = JoinSet::new();
        let answers = Arc::clone(&says);
        task.spawn(async move {
            let mut query = [0; 512];
            while let Ok((length, peer)) = socket.recv_from(&mut query).await {
                let says = {
                    let mut says = answers.lock().unwrap_or_else(PoisonError::into_inner);
                    says.1 += 1;
                    says.0.clone()
                };
                if let Some(answer) = answer(&query[..length], &says) {
                    let _ = socket.send_to(&answer, peer).await;
                }
            }
        });
        Self { says, _task: task }
    }

    /// Sets the answer from now on.
    pub fn set_answer(&self, says: Answer) {
        self.locked().0 = says;
    }

    /// Returns the number of queries so far.
    pub fn queries(&self) -> usize {
        self.locked().1
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, (Answer, usize)> {
        self.says.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn answer(query: &[u8], says: &Answer) -> Option<Vec<u8>> {
    // The question: labels up to an empty one, type and class.
    let mut end = 12;
    while query[end] > 0 {
        end += 1 + usize::from(query[end]);
    }
    let (kind, question) = (&query[end + 1..end + 3], &query[12..end + 5]);
    let (addresses, ttl, code) = match says {
        Answer::Addresses(addresses, ttl) => (addresses.as_slice(), *ttl, 0),
        Answer::Code(code) => (&[][..], 0, *code),
        Answer::Nothing => return None,
    };
    let data: Vec<Vec<u8>> = addresses
        .iter()
        .filter_map(|ip| match (ip, kind) {
            (IpAddr::V4(ip), [0, 1]) => Some(ip.octets().into()),
            (IpAddr::V6(ip), [0, 28]) => Some(ip.octets().into()),
            _ => None,
        })
        .collect();
    let count = u16::try_from(data.len()).expect("few").to_be_bytes();
    // The id; flags of a response with recursion desired and available; one question, and the
    // answers.
    let mut answer = query[..2].to_vec();
    answer.extend([0x81, 0x80 | code, 0, 1, count[0], count[1], 0, 0, 0, 0]);
    answer.extend(question);
    for data in data {
        // A pointer to the name in the question; its type; class IN.
        answer.extend([0xc0, 12, kind[0], kind[1], 0, 1]);
        answer.extend(ttl.to_be_bytes());
        answer.extend(u16::try_from(data.len()).expect("short").to_be_bytes());
        answer.extend(data);
    }
    Some(answer)
}
