//! Attacking connection, which sends until its time is up or the gateway has ended it.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use strait::tools::conformance::floods::Flood;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout, timeout_at};

use crate::attacks::{Attack, AttackKind, NAMES, RecordRound, frames, left_streams};
use crate::records::{self, RecordReader, RecordWriter};
use crate::support::raw::{self, frame, headers};

/// Minimum of bytes per write, as rounds are small.
const WRITE_BYTES: usize = 16 * 1024;
/// Priority of the attackers. The victim shares their processor, and must not wait for it.
const NICENESS: i32 = 15;

/// Outcome of one attacking connection.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Bytes and frames that the kernel accepted, before TLS. Floods of records count records, and
    /// their bytes on the wire.
    pub bytes: u64,
    pub frames: u64,
    /// Time from the beginning of the flood to its end, or to the end of the attacker's time.
    pub lasted: Duration,
    pub end: End,
}

/// End of an attacking connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum End {
    #[default]
    StillOpen,
    /// GOAWAY with this code, followed by the end of the connection.
    GoAway(u32),
    /// End of the connection alone.
    Closed,
}

/// Runs this many attacks concurrently, on a separate thread, for this time.
pub fn attack(
    address: SocketAddr,
    attack: &'static Attack,
    connections: u32,
    time: Duration,
) -> oneshot::Receiver<Vec<Outcome>> {
    let (done, outcomes) = oneshot::channel();
    std::thread::spawn(move || {
        // Affects only this thread: Linux has a priority for each.
        rustix::process::setpriority_process(None, NICENESS).expect("a lower priority");
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let all = async {
            let until = Instant::now() + time;
            let mut running = JoinSet::new();
            for _ in 0..connections {
                running.spawn(one(address, attack, until));
            }
            running.join_all().await
        };
        let _ = done.send(runtime.block_on(all));
    });
    outcomes
}

/// Runs one connection. The gateway rejected it if it cannot even begin.
async fn one(address: SocketAddr, attack: &'static Attack, until: Instant) -> Outcome {
    let mut outcome = Outcome::default();
    let connected = timeout_at(until, Peer::connect(address, attack.window)).await;
    let begun = Instant::now();
    match connected {
        Ok(Ok((peer, reading))) => peer.run(reading, &attack.what, until, &mut outcome).await,
        Ok(Err(_)) => outcome.end = End::Closed,
        Err(_) => {}
    }
    outcome.lasted = begun.elapsed();
    outcome
}

/// Hand-written HTTP/2, after TLS, preface and SETTINGS. It reads everything that arrives.
pub struct Peer {
    write: RecordWriter,
    answered: oneshot::Receiver<()>,
}

impl Peer {
    /// Connects with a valid certificate, and gives streams this window. Also returns the task that
    /// reads.
    pub async fn connect(address: SocketAddr, window: u32) -> io::Result<(Self, JoinHandle<End>)> {
        let (mut write, read) = records::connect(address).await?;
        let mut opening = raw::PREFACE.to_vec();
        opening.extend(raw::initial_window(window));
        opening.extend(frame(raw::SETTINGS, 1, 0, &[]));
        write.write_all(&opening).await?;
        let (answer, answered) = oneshot::channel();
        let reading = tokio::spawn(read_to_end(read, answer));
        Ok((Self { write, answered }, reading))
    }

    async fn run(
        mut self,
        mut reading: JoinHandle<End>,
        what: &AttackKind,
        until: Instant,
        outcome: &mut Outcome,
    ) {
        let sent = tokio::select! {
            biased;
            end = &mut reading => return outcome.end = end.expect("a reader"),
            sent = timeout_at(until, self.send_all(what, outcome)) => sent,
        };
        // The gateway's last frames are still under way when a write to it fails.
        let (rest, silent) = match sent {
            Ok(Err(_)) => (Duration::from_secs(1), End::Closed),
            _ => (until - Instant::now().min(until), End::StillOpen),
        };
        outcome.end = match timeout(rest, &mut reading).await {
            Ok(end) => end.expect("a reader"),
            Err(_) => silent,
        };
        reading.abort();
    }

    async fn send_all(&mut self, what: &AttackKind, outcome: &mut Outcome) -> io::Result<()> {
        match what {
            AttackKind::Silence => Ok(()),
            AttackKind::Leave => {
                self.tunnel().await?;
                self.send(&left_streams(), outcome).await
            }
            AttackKind::Flood(flood) => {
                self.tunnel().await?;
                self.flood(flood, outcome).await
            }
            AttackKind::Records(round) => {
                self.tunnel().await?;
                self.flood_records(*round, outcome).await
            }
        }
    }

    async fn flood(&mut self, flood: &Flood, outcome: &mut Outcome) -> io::Result<()> {
        let mut bytes = (flood.opening)(&NAMES);
        for index in 0.. {
            bytes.extend((flood.round)(&NAMES, index));
            if bytes.len() >= WRITE_BYTES {
                self.send(&bytes, outcome).await?;
                bytes.clear();
                // Yields to the reader, because writing may never block.
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }

    async fn flood_records(&mut self, round: RecordRound, outcome: &mut Outcome) -> io::Result<()> {
        let mut sent = 0;
        for index in 0.. {
            round(&mut self.write, index);
            if self.write.unsent() >= WRITE_BYTES {
                let bytes = self.write.unsent() as u64;
                self.write.flush().await?;
                outcome.bytes += bytes;
                outcome.frames += u64::from(index + 1 - sent);
                sent = index + 1;
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }

    /// Opens stream 1, and waits until it is answered.
    pub async fn tunnel(&mut self) -> io::Result<()> {
        self.write.write_all(&headers(1, &NAMES.connect())).await?;
        let answer = (&mut self.answered).await;
        answer.map_err(|_| io::ErrorKind::ConnectionAborted.into())
    }

    async fn send(&mut self, bytes: &[u8], outcome: &mut Outcome) -> io::Result<()> {
        self.write.write_all(bytes).await?;
        outcome.bytes += bytes.len() as u64;
        outcome.frames += frames(bytes);
        Ok(())
    }

    /// Sends DATA on stream 1.
    pub async fn data(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write.write_all(&frame(raw::DATA, 0, 1, bytes)).await
    }
}

/// Reads frames until the connection ends. Signals the first answer on stream 1.
async fn read_to_end(mut read: RecordReader, answer: oneshot::Sender<()>) -> End {
    let mut answer = Some(answer);
    let (mut end, mut payload) = (End::Closed, Vec::new());
    loop {
        let mut head = [0; 9];
        if read.read_exact(&mut head).await.is_err() {
            return end;
        }
        let [high, middle, low, kind, _, stream @ ..] = head;
        payload.resize(u32::from_be_bytes([0, high, middle, low]) as usize, 0);
        if read.read_exact(&mut payload).await.is_err() {
            return end;
        }
        match (kind, payload.as_slice()) {
            (raw::GOAWAY, &[_, _, _, _, a, b, c, d, ..]) => {
                end = End::GoAway(u32::from_be_bytes([a, b, c, d]));
            }
            (raw::HEADERS, _) if u32::from_be_bytes(stream) == 1 => {
                answer.take().map(|answer| answer.send(()));
            }
            _ => {}
        }
    }
}
