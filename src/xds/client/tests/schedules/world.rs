//! One schedule: a server, a client, and a link that loses messages in flight when it breaks.

use std::collections::VecDeque;

use anyhow::Context;
use fastrand::Rng;

use super::oracle::{Oracle, check_answer};
use super::server::Server;
use super::wrong::{Fault, FaultyClient};
use super::*;

const STEPS: usize = 1_100;
/// Number of names of one type, without those of a huge push.
const NAMES: usize = 10;
/// Number of resources of a huge push.
const HUGE: usize = 80;
/// Steps in flight after which a response counts as slow.
const SLOW: usize = 10;

pub(super) struct World<'a> {
    rng: Rng,
    step: usize,
    server: Server,
    machine: FaultyClient,
    store: Store,
    oracle: Oracle,
    connected: bool,
    /// Remaining steps without activity of the server.
    silent: usize,
    /// Remaining steps without arriving responses.
    slow: usize,
    up: VecDeque<Request>,
    /// Responses in flight, with the step in which they were sent.
    down: VecDeque<(usize, Response)>,
    /// Nonces of this stream, and of earlier ones.
    nonces: (BTreeSet<String>, BTreeSet<String>),
    counts: &'a mut Counts,
}

impl<'a> World<'a> {
    pub(super) fn new(seed: u64, fault: Fault, counts: &'a mut Counts) -> Self {
        Self {
            rng: Rng::with_seed(seed),
            step: 0,
            server: Server::default(),
            machine: FaultyClient::new(fault),
            store: Store::default(),
            oracle: Oracle::default(),
            connected: false,
            silent: 0,
            slow: 0,
            up: VecDeque::new(),
            down: VecDeque::new(),
            nonces: Default::default(),
            counts,
        }
    }

    /// Returns the position in the schedule.
    pub(super) fn position(&self) -> String {
        format!("step {}", self.step)
    }

    pub(super) fn run(&mut self) -> Result<()> {
        while self.step < STEPS {
            self.step += 1;
            self.take_step()?;
        }
        self.settle().context("at the end")
    }

    fn count(&mut self, event: Event) {
        *self.counts.entry(event).or_default() += 1;
    }

    fn take_step(&mut self) -> Result<()> {
        self.silent = self.silent.saturating_sub(1);
        self.slow = self.slow.saturating_sub(1);
        if !self.connected && self.rng.u8(..5) == 0 {
            return self.connect();
        }
        let quiet = self.connected && self.silent == 0 && self.slow == 0;
        match self.rng.u8(..100) {
            0..20 => self.change(),
            20..36 if self.silent == 0 => {
                for _ in 0..self.rng.u8(1..4) {
                    self.serve()?;
                }
            }
            36..58 if self.silent == 0 => self.push(),
            58..78 if self.slow == 0 => self.receive()?,
            78..85 => self.want()?,
            85..89 => self.forget()?,
            89 if quiet => {
                self.silent = self.rng.usize(5..20);
                self.count(Event::Silent);
            }
            90..92 if quiet => self.slow = self.rng.usize(SLOW..2 * SLOW),
            92..97 if self.connected => self.end()?,
            97 => self.restart()?,
            _ => {}
        }
        Ok(())
    }

    fn name(&mut self) -> String {
        format!("pod-{}", self.rng.usize(..NAMES))
    }

    fn type_url(&mut self) -> &'static str {
        TYPES[self.rng.usize(..TYPES.len())].type_url
    }

    /// Changes the resources of the server.
    fn change(&mut self) {
        let (type_url, name) = (self.type_url(), self.name());
        match self.rng.u8(..20) {
            0..7 => {
                let new = self.server.get(type_url, &name).is_none();
                self.server.put(type_url, &name, true);
                self.count(if new { Event::Added } else { Event::Updated });
            }
            7..11 => {
                self.server.put(type_url, &name, false);
                self.count(Event::MadeInvalid);
            }
            11..15 => {
                let mut names = (0..NAMES).map(|at| format!("pod-{at}"));
                if names.any(|name| self.server.roll_back(type_url, &name)) {
                    self.count(Event::RolledBack);
                }
            }
            15..19 => {
                if self.server.delete(type_url, &name) {
                    self.count(Event::Deleted);
                }
            }
            _ => {
                // All of them appear in one change and disappear in the next.
                for at in 0..HUGE {
                    let name = format!("huge-{at}");
                    if !self.server.delete(ADDRESS, &name) {
                        self.server.put(ADDRESS, &name, at % 8 == 0);
                    }
                }
            }
        }
    }

    /// Lets the server handle a request.
    fn serve(&mut self) -> Result<()> {
        match self.up.pop_front() {
            Some(request) => self.server.take(&request),
            None => Ok(()),
        }
    }

    /// Sends changes from the server, sometimes with mistakes.
    fn push(&mut self) {
        let type_url = self.type_url();
        let response = match self.rng.u8(..14) {
            0 => {
                let strange = "type.googleapis.com/istio.workload.Unheard";
                self.server.response(strange, Vec::new(), Vec::new())
            }
            1 | 2 => self.server.response(type_url, Vec::new(), Vec::new()),
            _ => self.server.respond(type_url),
        };
        let Some(mut response) = response else { return };
        for _ in 0..self.rng.u8(..3) {
            self.add_mistake(&mut response);
        }
        self.down.push_back((self.step, response));
    }

    /// Adds a mistake to a response, without a change of the server's state.
    fn add_mistake(&mut self, response: &mut Response) {
        let type_url = response.type_url.clone();
        let good = |name: &str| Resource {
            name: name.into(),
            version: "v0".into(),
            body: Some(Bytes::from("good")),
            body_type: type_url.as_str().into(),
        };
        let sent = &mut response.resources;
        let mistake = self.rng.u8(..8);
        if mistake < 4 && sent.is_empty() {
            sent.push(good("invented"));
        }
        let at = self.rng.usize(..sent.len().max(1));
        match mistake {
            0 => {
                let twice = sent[at].clone();
                sent.insert(self.rng.usize(..=sent.len()), twice);
            }
            1 => response.removed.push(sent[at].name.to_string()),
            2 => sent[at].body = None,
            3 => sent[at].body_type = format!("{type_url}Other").into(),
            4 => sent.push(good("")),
            5 => sent.push(good("*")),
            6 => sent.push(good(&"long".repeat(600))),
            _ => response.removed.push("never-heard-of".to_owned()),
        }
    }

    /// Delivers a response to the client.
    fn receive(&mut self) -> Result<()> {
        let Some((sent, response)) = self.down.pop_front() else {
            return Ok(());
        };
        if sent + SLOW <= self.step {
            self.count(Event::Slow);
        }
        if self.nonces.1.contains(&response.nonce) {
            self.count(Event::NonceReused);
        }
        self.nonces.0.insert(response.nonce.clone());
        self.classify(&response);
        let answers = self.machine.received(response.clone(), &mut self.store);
        let rejected = self.oracle.deliver(&response);
        let good = check_answer(&response, &answers, rejected.as_ref())?;
        self.count(if good { Event::Acked } else { Event::Nacked });
        let mut errors = answers.iter().filter_map(|answer| answer.error.as_ref());
        if errors.any(|error| error.ends_with(" more")) {
            self.count(Event::NackCut);
        }
        self.up.extend(answers);
        self.check()
    }

    /// Counts the properties of a response.
    fn classify(&mut self, response: &Response) {
        let sent = &response.resources;
        let names: BTreeSet<&str> = sent.iter().map(|one| &*one.name).collect();
        let bad = |one: &&Resource| one.body.as_deref() == Some(b"bad");
        let bad = sent.iter().filter(bad).count();
        let held = self.store.held.get(response.type_url.as_str());
        let is_held = |name: &String| held.is_some_and(|held| held.contains_key(name));
        let unclaimed = self.oracle.unclaimed.contains(&*response.type_url);
        let mut all_held = held.into_iter().flat_map(BTreeMap::keys);
        let unsaid = unclaimed && all_held.any(|name| !names.contains(&**name));
        let removed = &response.removed;
        let is_known = subscription(&response.type_url).is_some();
        let other = |one: &Resource| *one.body_type != *response.type_url;
        for (event, happened) in [
            (Event::FirstOfItsType, is_known && !self.oracle.has_response(&response.type_url)),
            (Event::Empty, is_known && sent.is_empty() && removed.is_empty()),
            (Event::Good, !sent.is_empty() && bad == 0),
            (Event::HalfBad, bad > 0 && bad < sent.len()),
            (Event::RemovedByAbsence, unsaid),
            (Event::WithRemovals, removed.iter().any(is_held)),
            (Event::RemovesUnknown, !removed.iter().all(is_held)),
            (Event::UnknownType, !is_known),
            (Event::SentTwice, names.len() < sent.len()),
            (Event::SentAndRemoved, removed.iter().any(|name| names.contains(name.as_str()))),
            (Event::NoName, names.contains("")),
            (Event::NameOfAll, names.contains("*")),
            (Event::LongName, names.iter().any(|name| name.len() > 2048)),
            (Event::NoBody, sent.iter().any(|one| one.body.is_none())),
            (Event::OtherBody, sent.iter().any(other)),
            (Event::Huge, sent.len() > 64),
            (Event::Unwanted, self.has_unwanted(response)),
        ] {
            if happened {
                self.count(event);
            }
        }
    }

    /// Returns whether a response has a valid resource that is not wanted.
    fn has_unwanted(&self, response: &Response) -> bool {
        let wanted = |one: &Resource| self.oracle.wanted.contains(&*one.name);
        let mut sent = response.resources.iter();
        response.type_url == DEMAND && sent.any(|one| validate(one).is_ok() && !wanted(one))
    }

    fn want(&mut self) -> Result<()> {
        let name = self.name();
        let mut names = self.oracle.wanted.clone();
        let new = names.insert(name);
        self.count(match (new, self.connected) {
            (false, _) => Event::WantedAgain,
            (true, true) => Event::Wanted,
            (true, false) => Event::WantedWithoutStream,
        });
        self.set_wanted(names)
    }

    fn forget(&mut self) -> Result<()> {
        let mut names = self.oracle.wanted.clone();
        if let Some(name) = names.iter().nth(self.rng.usize(..names.len().max(1))) {
            let name = name.clone();
            names.remove(&name);
        }
        self.count(if self.connected {
            Event::Unsubscribed
        } else {
            Event::ForgottenWithoutStream
        });
        self.set_wanted(names)
    }

    /// Replaces the wanted names, and checks that the changes are sent while connected.
    fn set_wanted(&mut self, names: BTreeSet<String>) -> Result<()> {
        let sent = self.machine.want(&names, &mut self.store);
        let (new, gone) = self.oracle.want(names);
        let change = |subscribe: Vec<String>, unsubscribe: Vec<String>| Request {
            type_url: DEMAND.into(),
            subscribe,
            unsubscribe,
            ..Request::default()
        };
        let mut expected = Vec::new();
        if self.connected && !new.is_empty() {
            expected.push(change(new, Vec::new()));
        }
        if self.connected && !gone.is_empty() {
            expected.push(change(Vec::new(), gone));
        }
        ensure!(sent == expected, "{sent:?} instead of {expected:?}");
        self.up.extend(sent);
        self.check()
    }

    fn connect(&mut self) -> Result<()> {
        if self.rng.u8(..4) == 0 {
            self.count(Event::ConnectFailed);
            return self.ended(StreamEnd::Connect);
        }
        self.count(Event::Connected);
        let requests = self.machine.connected();
        self.oracle.check_first(&requests)?;
        for _ in 0..self.oracle.unclaimed.len() {
            self.count(Event::InitialVersionsOmitted);
        }
        self.up.extend(requests);
        self.connected = true;
        let anew = self.rng.bool();
        self.server.open(anew);
        Ok(())
    }

    /// Ends the stream. Messages in flight are lost.
    fn end(&mut self) -> Result<()> {
        let (end, event) = match self.rng.u8(..8) {
            0 => (StreamEnd::Clean, Event::EndedCleanly),
            1 => (StreamEnd::GoAway, Event::EndedCleanly),
            2..=4 => (StreamEnd::Harmless, Event::EndedCleanly),
            _ => (StreamEnd::Status, Event::EndedByStatus),
        };
        self.count(event);
        let is_answer = |request: &Request| !request.nonce.is_empty();
        let answer = self.up.iter().any(is_answer);
        let request = !self.up.iter().all(is_answer);
        let response = !self.down.is_empty();
        for (event, happened) in [
            (Event::AnswerLost, answer),
            (Event::RequestLost, request),
            (Event::ResponseLost, response),
            (Event::EndedIdle, !(answer || request || response)),
        ] {
            if happened {
                self.count(event);
            }
        }
        self.server.close();
        self.ended(end)
    }

    fn ended(&mut self, end: StreamEnd) -> Result<()> {
        let wait = self.machine.disconnected(end);
        let expected = self.oracle.wait(end);
        ensure!(wait == expected, "{wait:?} instead of {expected:?}");
        self.connected = false;
        self.up.clear();
        (self.silent, self.slow) = (0, 0);
        let late = self.down.pop_front();
        self.down.clear();
        let (here, before) = (&mut self.nonces.0, &mut self.nonces.1);
        before.append(here);
        if let Some((_, response)) = late {
            self.count(Event::ReceivedAfterTheEnd);
            let client = &mut self.machine.client;
            let answers = client.received(response, &mut self.store);
            ensure!(answers.is_empty(), "{answers:?} after the end");
        }
        self.check()
    }

    /// Restarts the process with the state that the previous one wrote.
    fn restart(&mut self) -> Result<()> {
        if self.connected {
            self.end()?;
        }
        self.count(Event::Restarted);
        // The wanted names survive a restart, except for changes in the meantime.
        let mut wanted = self.oracle.wanted.clone();
        if self.rng.bool() {
            wanted.pop_first();
        }
        self.oracle.restart();
        self.machine.restart();
        for (type_url, held) in &self.oracle.held {
            for (name, kept) in held {
                let client = &mut self.machine.client;
                let (name, version) = (name.as_str(), kept.version.as_str());
                let held = client.restore(type_url, name, version, 0);
                ensure!(held, "no room");
            }
        }
        if self.oracle.unplaced {
            let client = &mut self.machine.client;
            ensure!(!client.restore(POLICY, SHARED_PLACEHOLDER, "", 0), "it has no place");
        }
        self.set_wanted(wanted)
    }

    fn check(&self) -> Result<()> {
        self.oracle.check_state(&self.machine.client, &self.store)
    }

    /// Checks that the client holds the server's resources in the end, without further
    /// mistakes.
    fn settle(&mut self) -> Result<()> {
        (self.silent, self.slow) = (0, 0);
        if self.connected {
            self.deliver_all()?;
            ensure!(self.server.unanswered() == 0, "a response has no answer");
            self.end()?;
        }
        for again in [false, true] {
            self.reconnect()?;
            let claimed = !self.oracle.unclaimed.contains(ADDRESS);
            let sent = self.deliver_all()?;
            let good = |one: &Resource| one.body.as_deref() == Some(b"good");
            let sent = sent.iter().filter(|sent| sent.type_url == ADDRESS);
            let twice = sent.flat_map(|sent| &sent.resources).any(good);
            ensure!(!(again && claimed && twice), "what is held was sent again");
            ensure!(self.server.unanswered() == 0, "a response has no answer");
            self.check_server()?;
            self.end()?;
        }
        Ok(())
    }

    fn reconnect(&mut self) -> Result<()> {
        while !self.connected {
            self.connect()?;
        }
        Ok(())
    }

    /// Delivers all messages, and returns the responses that the server sent meanwhile.
    fn deliver_all(&mut self) -> Result<Vec<Response>> {
        let mut sent = Vec::new();
        for _ in 0..20 {
            let before = sent.len();
            while !self.up.is_empty() {
                self.serve()?;
            }
            for one in TYPES {
                let response = self.server.respond(one.type_url);
                sent.extend(response.clone());
                self.down.extend(response.map(|response| (self.step, response)));
            }
            if self.down.is_empty() && before == sent.len() {
                return Ok(sent);
            }
            while !self.down.is_empty() {
                self.receive()?;
            }
        }
        bail!("it never gets quiet")
    }

    /// Checks that every valid resource is held in its current version, every invalid one in
    /// its last valid version that arrived, and nothing else.
    fn check_server(&self) -> Result<()> {
        for one in TYPES {
            let held = self.store.held.get(one.type_url);
            let held = |name: &String| held.and_then(|held| held.get(name));
            for (name, item) in self.server.items(one.type_url) {
                let wanted = one.mode == Mode::Wildcard || self.oracle.wanted.contains(name);
                let (held, version) = (held(name), &item.version);
                let right = match (item.good, held) {
                    (true, None) => !wanted,
                    (true, Some(held)) => wanted && held == version,
                    (false, held) => held != Some(version),
                };
                ensure!(right, "{name} is {held:?}, and {item:?} at the server");
            }
            for name in self.store.held.get(one.type_url).into_iter().flatten() {
                let there = self.server.get(one.type_url, name.0).is_some();
                ensure!(there, "{} is gone at the server", name.0);
            }
        }
        Ok(())
    }
}
