//! Certificate authority of the control plane.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use rcgen::SanType;
use strait::grpc::auth::{IstioCertificateRequest, IstioCertificateResponse};
use tonic::{Request, Response, Status};

use super::identities::{GATEWAY, Identities, identities};
use super::istiod::check_token;
use super::services::auth::istio_certificate_service_server::IstioCertificateService;

/// Authority that signs with the key of cluster east, which all tests share. It outlives the
/// server.
#[derive(Clone, Default)]
pub struct Ca(Arc<Mutex<State>>);

struct State {
    mode: Mode,
    life: (Duration, Duration),
    requests: Vec<(String, i64)>,
    /// Issuer, if not the shared cluster east, and the roots of the answers.
    rotated: (Option<Arc<Identities>>, Option<String>),
}

/// Behaviour towards requests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Signs,
    Refuses,
    SignsForAnother,
    AnswersOneElement,
}

impl Default for State {
    fn default() -> Self {
        Self {
            mode: Mode::Signs,
            life: (Duration::from_secs(120), Duration::from_secs(24 * 3600)),
            requests: Vec::new(),
            rotated: (None, None),
        }
    }
}

impl Ca {
    /// Sets the behaviour.
    pub fn set(&self, mode: Mode) {
        self.state().mode = mode;
    }

    /// Sets the time since the start of validity and the time left, for certificates from now on.
    pub fn lives(&self, past: Duration, left: Duration) {
        self.state().life = (past, left);
    }

    /// Signs with cluster east of `identities`, or the shared one, and answers with `roots`, from
    /// now on.
    pub fn rotate(&self, identities: Option<Arc<Identities>>, roots: &str) {
        self.state().rotated = (identities, Some(roots.to_owned()));
    }

    /// Returns the requests so far: the cluster, and the requested lifetime in seconds.
    pub fn requests(&self) -> Vec<(String, i64)> {
        self.state().requests.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panic with the lock held")
    }
}

#[tonic::async_trait]
impl IstioCertificateService for Ca {
    async fn create_certificate(
        &self,
        call: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        check_token(call.metadata())?;
        let cluster = call.metadata().get("clusterid");
        let cluster = cluster.and_then(|cluster| cluster.to_str().ok());
        let cluster = cluster.unwrap_or_default().to_owned();
        let mut state = self.state();
        let request = call.into_inner();
        state.requests.push((cluster, request.validity_duration));
        let id = match state.mode {
            Mode::Refuses => return Err(Status::permission_denied("not today")),
            Mode::SignsForAnother => "spiffe://east.local/ns/istio-system/sa/default",
            Mode::Signs | Mode::AnswersOneElement => GATEWAY,
        };
        let now = SystemTime::now();
        let (past, left) = state.life;
        let (issuer, roots) = &state.rotated;
        let issuer = issuer.as_deref().unwrap_or_else(|| identities());
        let signed = issuer.east.sign(&request.csr, |params| {
            params.subject_alt_names = vec![SanType::URI(id.try_into().expect("a uri"))];
            params.not_before = (now - past).into();
            params.not_after = (now + left).into();
        });
        let mut cert_chain = Vec::from(signed.map_err(|error| {
            let why = format!("no request that can be signed: {error:?}");
            Status::invalid_argument(why)
        })?);
        cert_chain.push(roots.clone().unwrap_or_else(|| identities().root.clone()));
        if state.mode == Mode::AnswersOneElement {
            cert_chain.truncate(1);
        }
        Ok(Response::new(IstioCertificateResponse { cert_chain }))
    }
}
