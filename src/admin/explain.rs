//! GET `/explain`: outcome of a tunnel, without opening it. The handler computes the answer.

use std::io;
use std::sync::Arc;

use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::explain::{Answer, Question};

use super::{AdminState, stream};

/// Function that answers the question, or returns the mistake in it.
pub type ExplainHandler = Arc<dyn Fn(&Question) -> Result<Answer, String> + Send + Sync>;

/// Responds with the answer, or with 400 to an invalid query. A service with many endpoints takes
/// long, so both the computation and the writing use blocking threads.
pub(super) async fn explain(
    State(state): State<AdminState>,
    Query(question): Query<Question>,
) -> Response {
    match tokio::task::spawn_blocking(move || (state.explain)(&question)).await {
        Ok(Ok(answer)) => {
            let body = stream::body(move |pieces| {
                serde_json::to_writer(pieces, &answer).map_err(io::Error::from)
            });
            ([(header::CONTENT_TYPE, "application/json")], body).into_response()
        }
        Ok(Err(why)) => (StatusCode::BAD_REQUEST, format!("{why}\n")).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::admin_router;
    use super::super::tests::{ask, fixture};
    use super::*;

    #[tokio::test]
    async fn a_question_is_answered_or_refused_with_what_to_write() {
        let fixture = fixture();
        let router = admin_router(fixture.state.clone());
        let (status, body) = ask(router.clone(), "GET", "/explain?to=a%3A80&all=").await;
        assert_eq!(status, StatusCode::OK);
        let answer: Answer = serde_json::from_str(&body).expect("an answer");
        assert_eq!(answer.notes, ["to=a%3A80&all=true"]);
        let (status, _) = ask(router.clone(), "GET", "/explain?too=a%3A80").await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        let (status, body) = ask(router, "GET", "/explain?to=wrong").await;
        assert_eq!((status, &*body), (StatusCode::BAD_REQUEST, "write it right\n"));
    }
}
