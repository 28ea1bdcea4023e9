//! Byte oracle: tunnels of which both sides send and verify at the same time.
//!
//! The client first sends its name and the number of bytes in each direction. Each direction is a
//! separate stream, and every byte is compared at its offset. An end is clean only if the other
//! side's end follows its last byte. The oracle therefore detects every path that loses, doubles,
//! changes or mixes up bytes, and no broken path looks clean.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::{ECHO, Endpoint, bytes};

/// Bytes sent or compared at once.
const CHUNK: usize = 16 * 1024;
/// Length of the head, which is four numbers.
const HEAD_BYTES: usize = 4 * 8;

/// Payload of a tunnel.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Name of the tunnel. Below 2^56, so that the first byte of a tunnel is 0.
    pub id: u64,
    /// Bytes to the endpoint.
    pub up: u64,
    /// Bytes to the client.
    pub down: u64,
    /// Rest of both sides after each 16 KiB.
    pub rest: Duration,
}

/// End of the received stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The other side's own end, after its last byte.
    Clean,
    /// A reset, with its code if it has one, or the loss of the connection.
    Broken(Option<h2::Reason>),
    /// A clean end before the last byte, which is an error of the path.
    Short,
    /// A byte after the last one, which is an error of the path too.
    Long,
    /// A byte other than the one of this stream at this offset, the worst error.
    Wrong,
}

/// Result of one side of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SideResult {
    /// Number of correct bytes from the other side.
    pub received: u64,
    /// End of the received bytes.
    pub end: End,
    /// True if this side has sent all its bytes and its end.
    pub finished: bool,
}

impl Plan {
    /// Plans the same number of bytes in both directions, without a rest.
    pub const fn both(id: u64, bytes: u64) -> Self {
        Self { id, up: bytes, down: bytes, rest: Duration::ZERO }
    }

    /// Returns the head, which the client sends before its bytes.
    pub fn head(&self) -> Vec<u8> {
        let rest = u64::try_from(self.rest.as_millis()).expect("a short rest");
        [self.id, self.up, self.down, rest].map(u64::to_be_bytes).concat()
    }

    fn parse(head: &[u8; HEAD_BYTES]) -> Self {
        let number = |at: usize| {
            let bytes = head[8 * at..][..8].try_into().expect("eight bytes");
            u64::from_be_bytes(bytes)
        };
        Self {
            id: number(0),
            up: number(1),
            down: number(2),
            rest: Duration::from_millis(number(3)),
        }
    }

    /// Returns the name of the stream to the client, which is not the name of any stream to an
    /// endpoint.
    pub const fn down_stream(&self) -> u64 {
        !self.id
    }
}

impl SideResult {
    /// Returns the result of a complete transfer with a clean end.
    pub const fn complete(received: u64) -> Self {
        Self { received, end: End::Clean, finished: true }
    }

    fn broken(error: &io::Error) -> Self {
        Self { received: 0, end: End::Broken(Tunnel::reset_code(error)), finished: false }
    }
}

/// Returns true if the results of both sides are consistent. A side sees a clean end only if the
/// other one has sent it, and a break otherwise.
pub fn is_consistent(client: SideResult, endpoint: SideResult) -> bool {
    [(client, endpoint), (endpoint, client)].iter().all(|(one, other)| match one.end {
        End::Clean => other.finished,
        End::Broken(_) => true,
        End::Short | End::Long | End::Wrong => false,
    })
}

/// Opens a tunnel and runs the client's side.
pub async fn tunnel(client: &Client, plan: Plan) -> SideResult {
    let tunnel = client.tunnel(ECHO).await.expect("a tunnel");
    drive(tunnel, plan).await
}

/// Runs the client's side of an open tunnel to its end.
pub async fn drive(mut stream: impl AsyncRead + AsyncWrite + Unpin, plan: Plan) -> SideResult {
    match stream.write_all(&plan.head()).await {
        Ok(()) => resume(stream, plan).await,
        Err(error) => SideResult::broken(&error),
    }
}

/// Runs the client's side after the head was sent.
pub async fn resume(stream: impl AsyncRead + AsyncWrite + Unpin, plan: Plan) -> SideResult {
    let (sends, receives) = ((plan.id, plan.up), (plan.down_stream(), plan.down));
    side(stream, sends, receives, plan.rest).await
}

/// Runs the endpoint's side of a tunnel to its end. Returns its plan too, if that arrived.
pub async fn answer(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> (Option<Plan>, SideResult) {
    let mut head = [0; HEAD_BYTES];
    if let Err(error) = stream.read_exact(&mut head).await {
        let mut side = SideResult::broken(&error);
        if error.kind() == io::ErrorKind::UnexpectedEof {
            side.end = End::Short;
        }
        return (None, side);
    }
    let plan = Plan::parse(&head);
    let (sends, receives) = ((plan.down_stream(), plan.down), (plan.id, plan.up));
    (Some(plan), side(stream, sends, receives, plan.rest).await)
}

/// Sends one stream and receives another, until both have ended.
async fn side(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    sends: (u64, u64),
    receives: (u64, u64),
    rest: Duration,
) -> SideResult {
    let (read, write) = tokio::io::split(stream);
    let (mut sending, mut receiving) =
        (pin!(send(write, sends, rest)), pin!(receive(read, receives)));
    let mut finished = None;
    let (received, mut end) = loop {
        tokio::select! {
            sent = &mut sending, if finished.is_none() => finished = Some(sent.is_ok()),
            received = &mut receiving => break received,
        }
    };
    let finished = match (finished, end) {
        // The kernel reports a reset once, to the first reader or writer. After a failed write, the
        // end that the reader sees is therefore not clean.
        (Some(false), End::Clean | End::Short) => {
            end = End::Broken(None);
            false
        }
        (Some(finished), _) => finished,
        (None, End::Clean | End::Short) => sending.await.is_ok(),
        (None, _) => false,
    };
    SideResult { received, end, finished }
}

async fn send(
    mut stream: impl AsyncWrite + Unpin,
    (id, length): (u64, u64),
    rest: Duration,
) -> io::Result<()> {
    let mut at = 0;
    while at < length {
        let next = length.min(at + CHUNK as u64);
        bytes::send(&mut stream, id, at, next).await?;
        at = next;
        if !rest.is_zero() {
            // deadline: the pace of a long tunnel is intended.
            tokio::time::sleep(rest).await;
        }
    }
    stream.shutdown().await
}

async fn receive(mut stream: impl AsyncRead + Unpin, (id, length): (u64, u64)) -> (u64, End) {
    let mut at = 0;
    let (mut buffer, mut wanted) = (vec![0; CHUNK], vec![0; CHUNK]);
    loop {
        let count = match stream.read(&mut buffer).await {
            Ok(0) if at == length => return (at, End::Clean),
            Ok(0) => return (at, End::Short),
            Ok(count) => count,
            Err(error) => return (at, End::Broken(Tunnel::reset_code(&error))),
        };
        let (got, wanted) = (&buffer[..count], &mut wanted[..count]);
        bytes::fill(id, at, wanted);
        let left = usize::try_from(length - at).unwrap_or(usize::MAX);
        let end = if got[..count.min(left)] != wanted[..count.min(left)] {
            End::Wrong
        } else if count > left {
            End::Long
        } else {
            at += count as u64;
            continue;
        };
        let right = got.iter().zip(&*wanted).take_while(|(one, other)| one == other);
        return (length.min(at + right.count() as u64), end);
    }
}

/// Results of the endpoints' sides so far.
#[derive(Clone, Debug)]
pub struct Oracle(watch::Sender<Results>);

#[derive(Debug, Default)]
struct Results {
    /// Results by the tunnel's name: the address at which it arrived, and its end there.
    sides: BTreeMap<u64, (SocketAddr, SideResult)>,
    /// Errors that belong to no tunnel.
    unattributed_errors: Vec<String>,
}

impl Results {
    fn add(&mut self, plan: Option<Plan>, ended: (SocketAddr, SideResult)) {
        let Some(Plan { id, .. }) = plan else {
            // A broken head has no name. A clean end within the head is an error of the path, as in
            // a tunnel.
            if ended.1.end == End::Short {
                self.unattributed_errors.push("an early clean end".to_owned());
            }
            return;
        };
        if self.sides.insert(id, ended).is_some() {
            self.unattributed_errors.push(format!("tunnel {id} came twice"));
        }
    }
}

impl Oracle {
    pub fn new() -> Self {
        Self(watch::Sender::new(Results::default()))
    }

    /// Starts an endpoint whose connections all belong to the oracle.
    pub fn endpoint(&self, listener: TcpListener) -> Endpoint {
        let oracle = self.clone();
        Endpoint::new(listener, move |stream| {
            let oracle = oracle.clone();
            async move { oracle.answer(stream).await }
        })
    }

    /// Runs the endpoint's side of one connection.
    pub async fn answer(&self, stream: TcpStream) {
        let address = stream.local_addr().expect("an open connection");
        let (plan, side) = answer(stream).await;
        self.0.send_modify(|outcomes| outcomes.add(plan, (address, side)));
    }

    /// Returns the endpoint's side of a tunnel, once it has ended.
    pub async fn side(&self, id: u64) -> SideResult {
        self.ended(id).await.1
    }

    /// Returns the address at which a tunnel arrived, and the endpoint's side, once it has ended.
    pub async fn ended(&self, id: u64) -> (SocketAddr, SideResult) {
        let mut outcomes = self.0.subscribe();
        let outcomes = outcomes.wait_for(|outcomes| {
            !outcomes.unattributed_errors.is_empty() || outcomes.sides.contains_key(&id)
        });
        let outcomes = outcomes.await.expect("an oracle");
        assert!(outcomes.unattributed_errors.is_empty(), "{:?}", outcomes.unattributed_errors);
        outcomes.sides[&id]
    }

    /// Returns the endpoint's side of a tunnel that has ended there.
    pub fn known(&self, id: u64) -> Option<SideResult> {
        self.0.borrow().sides.get(&id).map(|(_, side)| *side)
    }

    /// Returns the errors that belong to no tunnel.
    pub fn errors(&self) -> Vec<String> {
        self.0.borrow().unattributed_errors.clone()
    }

    /// Asserts that a tunnel was complete: every byte of both directions, and two clean ends.
    pub async fn whole(&self, plan: Plan, client: SideResult) {
        assert_eq!(client, SideResult::complete(plan.down), "the client's side of {plan:?}");
        let endpoint = self.side(plan.id).await;
        assert_eq!(endpoint, SideResult::complete(plan.up), "the endpoint's side of {plan:?}");
    }
}
